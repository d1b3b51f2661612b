// Rows of weights times rows of activations. Part of loops.h.
#pragma once

namespace hf_sparse {
namespace {

// A row of weights times one of activations is summed in two registers, alternating: the sum is the same whichever
// function forms it.
struct Sum {
    Vec even = Isa::zero(), odd = Isa::zero();
    void add(int k, Vec weight, Vec x) { (k % 2 ? odd : even) = Isa::fma(weight, x, k % 2 ? odd : even); }
    float total() const { return Isa::sum(Isa::add(even, odd)); }
};

// `count` rows times one row of activations, unpacked in registers.
template <bool four_bit, int count>
inline void dot_packed(const Matrix& matrix, const Selection& selection, int64_t first, const float* x, float* out) {
    using Decoder = Isa::Decoder<four_bit>;
    const int64_t groups = groups_of(matrix.cols, matrix.group_size);
    const Rows<four_bit, count> rows(matrix, selection, first);
    Sum sums[count];
    const Decoder decoder(matrix.table);
    const int64_t block_bytes = Row<four_bit>::columns_to_bytes(block);
    int64_t at = 0;
    for (int64_t group = 0; group < groups; group++) {
        Decoder decoders[count] = {};
        for (int r = 0; r < count; r++) {
            decoders[r] = decoder;
            decoders[r].scale(from_bf16(rows.scales[r][group]));
            __builtin_prefetch(rows.next[r] + at);
        }
        for (int64_t c = 0; c < matrix.group_size; c += block, x += block, at += block_bytes) {
            for (int r = 0; r < count; r++) {
                Vec weights[vecs];
                decoders[r].decode(rows.codes[r] + at, weights);
                for (int k = 0; k < vecs; k++) sums[r].add(k, weights[k], Isa::load(x + k * Isa::width));
            }
        }
    }
    for (int r = 0; r < count; r++) out[r] = sums[r].total();
}

// One unpacked row times `count` rows of activations.
template <int count>
inline void dot_unpacked(const float* row, const float* x, int64_t padded, float* out, int64_t out_stride) {
    Sum sums[count];
    for (int64_t c = 0; c < padded; c += block) {
        for (int k = 0; k < vecs; k++) {
            const Vec weight = Isa::load(row + c + k * Isa::width);
            for (int t = 0; t < count; t++) sums[t].add(k, weight, Isa::load(x + t * padded + c + k * Isa::width));
        }
    }
    for (int t = 0; t < count; t++) out[t * out_stride] = sums[t].total();
}

template <bool four_bit>
void row_product_float(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, float* out,
                       int threads) {
    const int64_t padded = groups_of(matrix.cols, matrix.group_size) * matrix.group_size;
    Buffer<float> padded_x(padded == matrix.cols ? 0 : n * padded);
    if (padded != matrix.cols) {
        for (int64_t i = 0; i < n; i++) {
            float* to = padded_x.data + i * padded;
            std::memcpy(to, x + i * matrix.cols, static_cast<size_t>(matrix.cols) * sizeof(float));
            std::memset(to + matrix.cols, 0, static_cast<size_t>(padded - matrix.cols) * sizeof(float));
        }
        x = padded_x.data;
    }
    threads = useful_threads(threads, selection.count * padded);
    if (n == 1) {
        const int64_t pairs = selection.count / 2;
#pragma omp parallel for num_threads(threads)
        for (int64_t i = 0; i < pairs; i++) dot_packed<four_bit, 2>(matrix, selection, 2 * i, x, out + 2 * i);
        if (selection.count % 2) dot_packed<four_bit, 1>(matrix, selection, 2 * pairs, x, out + 2 * pairs);
        return;
    }
    Buffer<float> unpacked(threads * padded);
#pragma omp parallel num_threads(threads)
    {
        float* row = unpacked.data + thread_number() * padded;
        Isa::Decoder<four_bit> decoder(matrix.table);
#pragma omp for
        for (int64_t i = 0; i < selection.count; i++) {
            decode_columns(Row<four_bit>(matrix, row_at(selection, i)), decoder, 0, padded, matrix.group_size, row);
            int64_t t = 0;
            for (; t + 4 <= n; t += 4)
                dot_unpacked<4>(row, x + t * padded, padded, out + t * selection.count + i, selection.count);
            for (; t < n; t++)
                dot_unpacked<1>(row, x + t * padded, padded, out + t * selection.count + i, selection.count);
        }
    }
}

struct IntegerActivations {
    int8_t* values;        // [n, padded]
    float* scales;         // [n, groups]; NaN for all of a row that holds NaN or infinity
    int32_t* corrections;  // [n, groups, Isa::corrections]
    int64_t padded, groups;
};

template <bool four_bit, int group_size>
inline void quantize_activations(const float* x, int64_t cols, int64_t row, const IntegerActivations& out) {
    int8_t* values = out.values + row * out.padded;
    float* scales = out.scales + row * out.groups;
    bool finite = true;
    for (int64_t group = 0; group < out.groups; group++) {
        float group_values[group_size] = {};
        const int64_t start = group * group_size;
        std::memcpy(group_values, x + start, static_cast<size_t>(smaller(group_size, cols - start)) * sizeof(float));
        const uint32_t magnitude = largest_magnitude_bits(group_values, group_size);
        finite = finite && magnitude < 0x7f800000;
        float scale = from_bits(magnitude) / 127.0f;
        if (!(scale >= smallest_scale)) scale = 0;
        for (int64_t i = 0; i < group_size; i++) {
            const float ratio = scale == 0 ? 0.0f : group_values[i] / scale;
            values[start + i] = static_cast<int8_t>(to_signed_byte(ratio));
        }
        scales[group] = scale;
        int32_t* corrections = out.corrections + (row * out.groups + group) * Isa::corrections;
        Isa::IntegerGroup<four_bit, group_size>::prepare(values + start, corrections);
    }
    if (finite) return;
    for (int64_t group = 0; group < out.groups; group++) scales[group] = NAN;
}

// `rows` rows of weights times `count` rows of activations.
template <bool four_bit, int group_size, int rows, int count>
inline void dot_integer(const Matrix& matrix, const Selection& selection, int64_t first, const IntegerActivations& x,
                        int64_t x_first, float* out) {
    using Group = Isa::IntegerGroup<four_bit, group_size>;
    const Isa::Table table(matrix.table);
    const Rows<four_bit, rows> weights(matrix, selection, first);
    Vec sums[rows][count];
    for (int r = 0; r < rows; r++) {
        for (int t = 0; t < count; t++) sums[r][t] = Isa::zero();
    }
    const int8_t* x_values = x.values + x_first * x.padded;
    const float* x_scales = x.scales + x_first * x.groups;
    const int32_t* corrections = x.corrections + x_first * x.groups * Isa::corrections;
    const int64_t group_bytes = Row<four_bit>::columns_to_bytes(group_size);
    for (int64_t group = 0; group < x.groups; group++) {
        for (int r = 0; r < rows; r++) {
            Group values;
            values.load(weights.codes[r] + group * group_bytes, table);
            __builtin_prefetch(weights.next[r] + group * group_bytes);
            const float scale = from_bf16(weights.scales[r][group]);
            for (int t = 0; t < count; t++) {
                const int32_t* correction = corrections + (t * x.groups + group) * Isa::corrections;
                const Vec products = values.dot(x_values + t * x.padded + group * group_size, correction);
                sums[r][t] = Isa::fma(products, Isa::set1(scale * x_scales[t * x.groups + group]), sums[r][t]);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        for (int t = 0; t < count; t++) out[(x_first + t) * selection.count + first + r] = Isa::sum(sums[r][t]);
    }
}

template <bool four_bit, int group_size>
void row_product_integer(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, float* out,
                         int threads) {
    const int64_t groups = groups_of(matrix.cols, group_size), padded = groups * group_size;
    Buffer<int8_t> values(n * padded);
    Buffer<float> scales(n * groups);
    Buffer<int32_t> corrections(n * groups * Isa::corrections);
    const IntegerActivations activations{values.data, scales.data, corrections.data, padded, groups};
    const int64_t pairs = selection.count / 2;
#pragma omp parallel num_threads(useful_threads(threads, selection.count* padded))
    {
#pragma omp for
        for (int64_t i = 0; i < n; i++) {
            quantize_activations<four_bit, group_size>(x + i * matrix.cols, matrix.cols, i, activations);
        }
#pragma omp for
        for (int64_t i = 0; i < pairs; i++) {
            int64_t t = 0;
            for (; t + 4 <= n; t += 4)
                dot_integer<four_bit, group_size, 2, 4>(matrix, selection, 2 * i, activations, t, out);
            for (; t < n; t++) dot_integer<four_bit, group_size, 2, 1>(matrix, selection, 2 * i, activations, t, out);
        }
    }
    if (selection.count % 2) {
        for (int64_t t = 0; t < n; t++) {
            dot_integer<four_bit, group_size, 1, 1>(matrix, selection, 2 * pairs, activations, t, out);
        }
    }
}

template <bool four_bit>
void row_product_of(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, bool integer,
                    float* out, int threads) {
    if (!integer) {
        row_product_float<four_bit>(matrix, selection, x, n, out, threads);
    } else if (matrix.group_size == 32) {
        row_product_integer<four_bit, 32>(matrix, selection, x, n, out, threads);
    } else if (matrix.group_size == 64) {
        row_product_integer<four_bit, 64>(matrix, selection, x, n, out, threads);
    } else {
        row_product_integer<four_bit, 128>(matrix, selection, x, n, out, threads);
    }
}

void row_product(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, bool integer, float* out,
                 int threads) {
    if (matrix.table) {
        row_product_of<true>(matrix, selection, x, n, integer, out, threads);
    } else {
        row_product_of<false>(matrix, selection, x, n, integer, out, threads);
    }
}

}  // namespace
}  // namespace hf_sparse
