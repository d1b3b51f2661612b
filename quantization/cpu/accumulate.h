// Sums of rows of weights. Part of loops.h.
#pragma once

namespace hf_sparse {
namespace {

// y[c] += sum over `count` rows of a[r] * weight[r, c], for columns [start, stop), unpacked in registers.
template <bool four_bit, int count>
inline void add_packed(const Matrix& matrix, const Selection& selection, int64_t first, const float* a, int64_t start,
                       int64_t stop, float* y) {
    using Decoder = Isa::Decoder<four_bit>;
    const Decoder decoder(matrix.table);
    const Rows<four_bit, count> rows(matrix, selection, first);
    Vec factors[count];
    for (int r = 0; r < count; r++) factors[r] = Isa::set1(a[r]);
    for (int64_t group_start = start; group_start < stop; group_start += matrix.group_size) {
        Decoder decoders[count] = {};
        for (int r = 0; r < count; r++) {
            decoders[r] = decoder;
            decoders[r].scale(from_bf16(rows.scales[r][group_start / matrix.group_size]));
            __builtin_prefetch(rows.next[r] + Row<four_bit>::columns_to_bytes(group_start));
        }
        for (int64_t c = group_start; c < group_start + matrix.group_size; c += block) {
            Vec sums[vecs];
            for (int k = 0; k < vecs; k++) sums[k] = Isa::load(y + c + k * Isa::width);
            for (int r = 0; r < count; r++) {
                Vec weights[vecs];
                decoders[r].decode(rows.codes[r] + Row<four_bit>::columns_to_bytes(c), weights);
                for (int k = 0; k < vecs; k++) sums[k] = Isa::fma(factors[r], weights[k], sums[k]);
            }
            for (int k = 0; k < vecs; k++) Isa::store(y + c + k * Isa::width, sums[k]);
        }
    }
}

// The same for n rows of activations and of y: up to 4 rows of weights are unpacked once for all of them.
template <bool four_bit>
inline void add_unpacked(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, int64_t start,
                         int64_t stop, float* y, int64_t y_stride) {
    Isa::Decoder<four_bit> decoder(matrix.table);
    for (int64_t at = start; at < stop; at += tile) {
        const int64_t end = smaller(at + tile, stop);
        for (int64_t first = 0; first < selection.count; first += 4) {
            float unpacked[4][tile];
            const int64_t count = smaller(4, selection.count - first);
            for (int64_t r = 0; r < count; r++) {
                const Row<four_bit> row(matrix, row_at(selection, first + r));
                decode_columns(row, decoder, at, end, matrix.group_size, unpacked[r]);
            }
            for (int64_t i = 0; i < n; i++) {
                const float* factors = a + i * selection.count + first;
                for (int64_t c = at; c < end; c += Isa::width) {
                    Vec sum = Isa::load(y + i * y_stride + c);
                    for (int64_t r = 0; r < count; r++)
                        sum = Isa::fma(Isa::set1(factors[r]), Isa::load(unpacked[r] + (c - at)), sum);
                    Isa::store(y + i * y_stride + c, sum);
                }
            }
        }
    }
}

// Threads share out columns, so that none adds to what another does and every column is summed in the order of the
// rows.
template <bool four_bit>
void accumulate_rows(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, float* out,
                     int threads) {
    const int64_t cols = matrix.cols, groups = groups_of(cols, matrix.group_size), padded = groups * matrix.group_size;
    Buffer<float> padded_out(padded == cols ? 0 : n * padded);
    float* y = padded == cols ? out : padded_out.data;
    threads = static_cast<int>(smaller(useful_threads(threads, selection.count * padded), groups));
#pragma omp parallel for num_threads(threads)
    for (int part = 0; part < threads; part++) {
        const int64_t start = groups * part / threads * matrix.group_size;
        const int64_t stop = groups * (part + 1) / threads * matrix.group_size;
        for (int64_t i = 0; i < n; i++)
            std::memset(y + i * padded + start, 0, static_cast<size_t>(stop - start) * sizeof(float));
        if (n != 1) {
            add_unpacked<four_bit>(matrix, selection, a, n, start, stop, y, padded);
            continue;
        }
        int64_t r = 0;
        for (; r + 4 <= selection.count; r += 4) add_packed<four_bit, 4>(matrix, selection, r, a + r, start, stop, y);
        for (; r < selection.count; r++) add_packed<four_bit, 1>(matrix, selection, r, a + r, start, stop, y);
    }
    if (padded == cols) return;
    for (int64_t i = 0; i < n; i++)
        std::memcpy(out + i * cols, y + i * padded, static_cast<size_t>(cols) * sizeof(float));
}

void accumulate(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, float* out, int threads) {
    if (matrix.table) {
        accumulate_rows<true>(matrix, selection, a, n, out, threads);
    } else {
        accumulate_rows<false>(matrix, selection, a, n, out, threads);
    }
}

}  // namespace
}  // namespace hf_sparse
