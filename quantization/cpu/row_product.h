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

inline float offset_part(const uint16_t* offsets, const float* sums, int64_t groups) {
    float total = 0;
    for (int64_t group = 0; group < groups; group++) total += from_bf16(offsets[group]) * sums[group];
    return total;
}

// Rows [first, last) of the selection times one row of activations -> out[first .. last). A thread's share of a product.

template <Kind kind>
void float_rows(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last, const Activations& x,
                float* out) {
    const Isa::Decoder<kind> plain(matrix.table);
    const int64_t ahead = rows_ahead<kind>(matrix), block_bytes = Row<kind>::columns_to_bytes(block);
    const auto some_rows = [&](int64_t at, auto how_many) {
        constexpr int count = decltype(how_many)::value;
        const Rows<kind, count> rows(matrix, selection, at, last, ahead);
        Sum sums[count];
        const float* values = x.floats;
        int64_t byte = 0;
        for (int64_t group = 0; group < x.groups; group++) {
            Isa::Decoder<kind> decoders[count] = {};
            for (int r = 0; r < count; r++) {
                decoders[r] = plain;
                decoders[r].scale(from_bf16(rows.scales[r][group]));
                prefetch(rows.next[r] + byte);
            }
            for (int64_t c = 0; c < matrix.group_size; c += block, values += block, byte += block_bytes) {
                for (int r = 0; r < count; r++) {
                    Vec weights[vecs];
                    decoders[r].decode(rows.codes[r] + byte, weights);
                    for (int k = 0; k < vecs; k++) sums[r].add(k, weights[k], Isa::load(values + k * Isa::width));
                }
            }
        }
        for (int r = 0; r < count; r++) {
            out[at + r] = sums[r].total();
            if (matrix.offsets) {
                const Row<kind> row(matrix, row_at(selection, at + r));
                out[at + r] += offset_part(row.offsets, x.sums, x.groups);
            }
        }
    };
    int64_t at = first;
    for (; at + 2 <= last; at += 2) some_rows(at, Size<2>());
    if (at < last) some_rows(at, Size<1>());
}

// `rows` rows of weights from position `at` on times `tokens` rows of activations from row t on. Several short rows share
// the loads of the activations and the end of their sums; of long ones, one at a time keeps the memory busiest.
template <Kind kind, int group_size, int rows, int tokens>
inline void integer_tile(const Matrix& matrix, const Selection& selection, int64_t at, int64_t last,
                         const Activations& x, int64_t t, const Isa::Table& table, int64_t ahead, float* out) {
    using Block = Isa::IntegerBlock<kind, group_size>;
    constexpr int chunk = 16;  // groups whose scales are formed at a time
    const Rows<kind, rows> weights(matrix, selection, at, last, ahead);
    const int64_t row_bytes = Row<kind>::columns_to_bytes(x.padded);
    Vec sums[rows][tokens][2];
    for (auto& of_row : sums) {
        for (auto& pair : of_row) pair[0] = pair[1] = Isa::zero();
    }
    for (int64_t start = 0; start < x.groups; start += chunk) {
        const int64_t groups = smaller(chunk, x.groups - start);
        alignas(64) float scales[rows][tokens][chunk];
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < tokens; i++) {
                const int64_t of_token = (t + i) * x.groups + start;
                sums[r][i][1] = Isa::mul_scales(weights.scales[r] + start, x.scales + of_token, x.corrections + of_token,
                                                groups, scales[r][i], sums[r][i][1]);
            }
        }
        const auto add_block = [&](int64_t k, int which, bool whole) {
            const int64_t byte = (start / Block::groups + k) * Block::bytes;
            const int8_t* bytes = x.bytes + 2 * (t * x.stride + (start + k * Block::groups) * group_size);
            for (int r = 0; r < rows; r++) {
                if (t == 0 && (Block::bytes >= 64 || byte % 64 == 0)) prefetch(weights.next[r] + byte);
                if (t == 0 && Block::bytes > 64) prefetch(weights.next[r] + byte + 64);
                Block values;
                values.load(weights.codes[r] + byte, whole ? int64_t{Block::bytes} : row_bytes - byte, table);
                for (int i = 0; i < tokens; i++)
                    sums[r][i][which] = Isa::fma(values.dot(bytes + 2 * i * x.stride),
                                                 Block::lanes(scales[r][i] + k * Block::groups), sums[r][i][which]);
            }
        };
        if (groups == chunk) {
#pragma GCC unroll 16
            for (int k = 0; k < chunk / Block::groups; k++) add_block(k, k % 2, true);
        } else {
            int64_t k = 0;
            for (; (k + 1) * Block::groups <= groups; k++) add_block(k, 0, true);
            if (k * Block::groups < groups) add_block(k, 1, false);
        }
    }
    if constexpr (rows == 4 && tokens == 1) {
        Isa::store_sums(Isa::add(sums[0][0][0], sums[0][0][1]), Isa::add(sums[1][0][0], sums[1][0][1]),
                        Isa::add(sums[2][0][0], sums[2][0][1]), Isa::add(sums[3][0][0], sums[3][0][1]),
                        out + t * selection.count + at);
    }
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < tokens; i++) {
            float& result = out[(t + i) * selection.count + at + r];
            if (rows != 4 || tokens != 1) result = Isa::sum(Isa::add(sums[r][i][0], sums[r][i][1]));
            if (matrix.offsets) {
                const Row<kind> row(matrix, row_at(selection, at + r));
                result += offset_part(row.offsets, x.sums + (t + i) * x.groups, x.groups);
            }
        }
    }
}

template <Kind kind, int group_size>
void integer_rows(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last, const Activations& x,
                  float* out) {
    const Isa::Table table(matrix.table);
    const int64_t ahead = rows_ahead<kind>(matrix);
    int64_t at = first;
    if (x.padded <= short_row) {
        for (; at + 4 <= last; at += 4)
            integer_tile<kind, group_size, 4, 1>(matrix, selection, at, last, x, 0, table, larger(ahead, 4), out);
    }
    if (selection.index) {  // rows here and there: two at a time keep more of them on their way
        for (; at + 2 <= last; at += 2)
            integer_tile<kind, group_size, 2, 1>(matrix, selection, at, last, x, 0, table, larger(ahead, 4), out);
    }
    for (; at < last; at++)
        integer_tile<kind, group_size, 1, 1>(matrix, selection, at, last, x, 0, table, ahead, out);
}

// Times `n` rows of activations `x`, `stride` apart, -> out[i * out_stride + position].
inline void number_rows(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last, const float* x,
                        int64_t stride, int64_t n, float* out, int64_t out_stride) {
    const uint16_t* numbers = reinterpret_cast<const uint16_t*>(matrix.codes);
    const int64_t cols = matrix.cols, ahead = 1 + bytes_ahead / (2 * cols);
    for (int64_t at = first; at < last; at++) {
        const uint16_t* row = numbers + row_at(selection, at) * cols;
        const uint16_t* later = numbers + row_at(selection, smaller(at + ahead, last - 1)) * cols;
        for (int64_t i = 0; i < n; i++) {
            const float* values = x + i * stride;
            Sum sum;
            int64_t c = 0;
            for (; c + block <= cols; c += block) {
                if (i == 0) prefetch(later + c);
                for (int k = 0; k < vecs; k++)
                    sum.add(k, Isa::load(row + c + k * Isa::width), Isa::load(values + c + k * Isa::width));
            }
            float total = sum.total();
            for (; c < cols; c++) total += from_bf16(row[c]) * values[c];
            out[i * out_stride + at] = total;
        }
    }
}

// Rows [first, last) of the selection times the one row of activations that `x` holds.
inline void product_rows(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last,
                         const Activations& x, float* out) {
    if (first >= last) return;
    if (!matrix.scales) return number_rows(matrix, selection, first, last, x.floats, 0, 1, out, 0);
    const auto of_kind = [&](auto which) {
        constexpr Kind kind = static_cast<Kind>(decltype(which)::value);
        if (x.floats) return float_rows<kind>(matrix, selection, first, last, x, out);
        if (matrix.group_size == 32) return integer_rows<kind, 32>(matrix, selection, first, last, x, out);
        if (matrix.group_size == 64) return integer_rows<kind, 64>(matrix, selection, first, last, x, out);
        integer_rows<kind, 128>(matrix, selection, first, last, x, out);
    };
    if (matrix.table) return of_kind(Size<four_bit>());
    of_kind(Size<eight_bit>());
}

// Several rows of activations: weights are unpacked once for all of them.

// One unpacked row times `count` rows of activations.
template <int count>
inline void dot_unpacked(const float* row, const float* x, int64_t padded, int64_t stride, float* out,
                         int64_t out_stride) {
    Sum sums[count];
    for (int64_t c = 0; c < padded; c += block) {
        for (int k = 0; k < vecs; k++) {
            const Vec weight = Isa::load(row + c + k * Isa::width);
            for (int t = 0; t < count; t++) sums[t].add(k, weight, Isa::load(x + t * stride + c + k * Isa::width));
        }
    }
    for (int t = 0; t < count; t++) out[t * out_stride] = sums[t].total();
}

// `row`: memory for one unpacked row.
template <Kind kind>
void float_rows_of_many(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last,
                        const Activations& x, int64_t n, float* row, float* out) {
    Isa::Decoder<kind> decoder(matrix.table);
    for (int64_t at = first; at < last; at++) {
        decode_columns(Row<kind>(matrix, row_at(selection, at)), decoder, 0, x.padded, matrix.group_size, row);
        int64_t t = 0;
        for (; t + 4 <= n; t += 4)
            dot_unpacked<4>(row, x.floats + t * x.stride, x.padded, x.stride, out + t * selection.count + at, selection.count);
        for (; t < n; t++)
            dot_unpacked<1>(row, x.floats + t * x.stride, x.padded, x.stride, out + t * selection.count + at, selection.count);
    }
}

template <Kind kind, int group_size>
void integer_rows_of_many(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last,
                          const Activations& x, int64_t n, float* out) {
    const Isa::Table table(matrix.table);
    const auto rows_of = [&](int64_t at, auto rows) {
        constexpr int count = decltype(rows)::value;
        int64_t t = 0;
        for (; t + 4 <= n; t += 4)
            integer_tile<kind, group_size, count, 4>(matrix, selection, at, last, x, t, table, count, out);
        for (; t < n; t++)
            integer_tile<kind, group_size, count, 1>(matrix, selection, at, last, x, t, table, count, out);
    };
    int64_t at = first;
    for (; at + 2 <= last; at += 2) rows_of(at, Size<2>());
    if (at < last) rows_of(at, Size<1>());
}

template <Kind kind>
void product_rows_of_many(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last,
                          const Activations& x, int64_t n, float* row, float* out) {
    if (x.floats) return float_rows_of_many<kind>(matrix, selection, first, last, x, n, row, out);
    if (matrix.group_size == 32) return integer_rows_of_many<kind, 32>(matrix, selection, first, last, x, n, out);
    if (matrix.group_size == 64) return integer_rows_of_many<kind, 64>(matrix, selection, first, last, x, n, out);
    integer_rows_of_many<kind, 128>(matrix, selection, first, last, x, n, out);
}

void row_product(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, Compute compute,
                 float* out, int threads) {
    if (n == 0 || selection.count == 0) return;
    ActivationMemory memory(n, matrix.cols, matrix.group_size, compute_of(matrix, compute));
    const Activations& rows = memory.rows;
    threads = useful_threads(threads, selection.count * rows.padded);
    Buffer<float> unpacked(n == 1 ? 0 : threads * rows.padded);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t i = 0; i < n; i++) prepare_row(matrix, x + i * matrix.cols, i, compute, rows);
        const int64_t team = team_size(), thread = thread_number();
        const int64_t first = selection.count * thread / team, last = selection.count * (thread + 1) / team;
        float* row = unpacked.data + thread * rows.padded;
        if (n == 1) {
            product_rows(matrix, selection, first, last, rows, out);
        } else if (!matrix.scales) {
            number_rows(matrix, selection, first, last, rows.floats, rows.stride, n, out, selection.count);
        } else if (matrix.table) {
            product_rows_of_many<four_bit>(matrix, selection, first, last, rows, n, row, out);
        } else {
            product_rows_of_many<eight_bit>(matrix, selection, first, last, rows, n, row, out);
        }
    }
}

}  // namespace
}  // namespace hf_sparse
