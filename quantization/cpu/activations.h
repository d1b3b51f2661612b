// Activations as the row products take them. Part of loops.h.
#pragma once

namespace hf_sparse {
namespace {

constexpr float whole_limit = 32512;  // 127 * 256 + a low byte of 0: the high byte of a rounded activation is -127..127

// Rows of activations for matrices of one width and group size, padded with zeros to whole groups. Either `floats`, or
// whole numbers times a scale per group. A row that holds NaN or infinity has scales of NaN.
struct Activations {
    float* floats;         // [n, stride]; null: whole numbers
    int8_t* bytes;         // [n, 2 * stride]
    float* scales;         // [n, groups]
    float* corrections;    // [n, groups]: what the products of a group's biased weights are too much by, times -1
    float* sums;           // [n, groups]: what an offset is multiplied by
    int64_t cols, padded, stride, groups, group_size;
};

struct ActivationMemory {
    Buffer<char> memory;
    Activations rows;

    static int64_t bytes_of(int64_t padded, int64_t groups) {
        return 4 * rounded_up(padded, block_columns) + 3 * rounded_up(4 * groups, 64);
    }
    ActivationMemory(int64_t n, int64_t cols, int64_t group_size, Compute compute)
        : memory(n * bytes_of(rounded_up(cols, group_size), groups_of(cols, group_size))) {
        place(&rows, memory.data, n, cols, group_size, compute);
    }
    // Lays out `n` rows in memory of bytes_of() * n.
    static void place(Activations* rows, char* at, int64_t n, int64_t cols, int64_t group_size, Compute compute) {
        const int64_t groups = groups_of(cols, group_size), padded = groups * group_size;
        rows->cols = cols;
        rows->padded = padded;
        rows->stride = rounded_up(padded, block_columns);
        rows->groups = groups;
        rows->group_size = group_size;
        rows->floats = compute == int8 ? nullptr : reinterpret_cast<float*>(at);
        rows->bytes = compute == int8 ? reinterpret_cast<int8_t*>(at) : nullptr;
        at += n * 4 * rows->stride;
        rows->corrections = reinterpret_cast<float*>(at);
        at += n * rounded_up(4 * groups, 64);
        rows->scales = reinterpret_cast<float*>(at);
        at += n * rounded_up(4 * groups, 64);
        rows->sums = reinterpret_cast<float*>(at);
    }
};

template <Kind kind, int group_size>
inline void round_row(const float* x, int64_t row, const Activations& out) {
    using Block = Isa::IntegerBlock<kind, group_size>;
    int8_t* bytes = out.bytes + row * 2 * out.stride;
    float* scales = out.scales + row * out.groups;
    bool finite = true;
    for (int64_t start = 0; start < out.padded; start += Block::columns) {
        int16_t numbers[Block::columns] = {};
        for (int64_t group = start / group_size; group < smaller(start / group_size + Block::groups, out.groups); group++) {
            float values[group_size] = {};
            const int64_t at = group * group_size;
            std::memcpy(values, x + at, static_cast<size_t>(smaller(group_size, out.cols - at)) * sizeof(float));
            const uint32_t magnitude = largest_magnitude_bits(values, group_size);
            finite = finite && magnitude < 0x7f800000;
            float scale = from_bits(magnitude) / whole_limit;
            if (!(scale >= smallest_scale)) scale = 0;
            int32_t sum = 0;
            for (int64_t i = 0; i < group_size; i++) {
                const float ratio = scale == 0 ? 0.0f : values[i] / scale;
                const int32_t number = static_cast<int32_t>(to_whole(ratio, whole_limit));
                numbers[at - start + i] = static_cast<int16_t>(number);
                sum += number;
            }
            scales[group] = scale;
            out.sums[row * out.groups + group] = scale * static_cast<float>(sum);
            out.corrections[row * out.groups + group] = -Isa::bias * static_cast<float>(sum);
        }
        Block::prepare(numbers, bytes + 2 * start);
    }
    if (finite) return;
    for (int64_t group = 0; group < out.groups; group++) scales[group] = NAN;
}

inline void pad_row(const float* x, int64_t row, bool bf16_too, const Activations& out) {
    float* to = out.floats + row * out.stride;
    if (bf16_too) {
        for (int64_t c = 0; c < out.cols; c++) to[c] = round_to_bf16(x[c]);
    } else {
        std::memcpy(to, x, static_cast<size_t>(out.cols) * sizeof(float));
    }
    std::memset(to + out.cols, 0, static_cast<size_t>(out.padded - out.cols) * sizeof(float));
    for (int64_t group = 0; group < out.groups; group++) {
        float sum = 0;
        for (int64_t c = 0; c < out.group_size; c++) sum += to[group * out.group_size + c];
        out.sums[row * out.groups + group] = sum;
    }
}

// Row `row` of `out`, for products with `matrix` or another of its width, kind and group size.
inline void prepare_row(const Matrix& matrix, const float* x, int64_t row, Compute compute, const Activations& out) {
    if (!out.bytes) return pad_row(x, row, compute == bf16, out);
    const auto of_group = [&](auto size) {
        if (matrix.table) {
            round_row<four_bit, decltype(size)::value>(x, row, out);
        } else {
            round_row<eight_bit, decltype(size)::value>(x, row, out);
        }
    };
    if (out.group_size == 32) return of_group(Size<32>());
    if (out.group_size == 64) return of_group(Size<64>());
    of_group(Size<128>());
}

// Whether products with both matrices take the same row of activations.
inline bool see_alike(const Matrix& a, const Matrix& b) {
    return a.group_size == b.group_size && !a.table == !b.table && !a.scales == !b.scales;
}

// What the products of a matrix are computed in: numbers are multiplied as floats.
inline Compute compute_of(const Matrix& matrix, Compute compute) {
    return matrix.scales || compute != int8 ? compute : fp32;
}

}  // namespace
}  // namespace hf_sparse
