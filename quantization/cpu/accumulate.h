// Sums of rows of weights. Part of loops.h.
#pragma once

namespace hf_sparse {
namespace {

constexpr int64_t rows_per_sum = 64;  // whose factors share a scale when rows are summed in integers

// Columns of y that a sum may write to: whole groups, and whole blocks of a sum in integers.
inline int64_t sum_width(const Matrix& matrix) {
    return rounded_up(groups_of(matrix.cols, matrix.group_size) * matrix.group_size, block_columns);
}

// y[c] += sum over `count` rows of a[r] * weight[r, c], for columns [start, stop), unpacked in registers.
template <Kind kind, int count>
inline void add_packed(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last, const float* a,
                       float* y) {
    const Isa::Decoder<kind> decoder(matrix.table);
    const Rows<kind, count> rows(matrix, selection, first, last, larger(count, rows_ahead<kind>(matrix)));
    const int64_t stop = groups_of(matrix.cols, matrix.group_size) * matrix.group_size;
    for (int64_t start = 0; start < stop; start += matrix.group_size) {
        Isa::Decoder<kind> decoders[count] = {};
        for (int r = 0; r < count; r++) {
            decoders[r] = decoder;
            decoders[r].scale(from_bf16(rows.scales[r][start / matrix.group_size]) * a[first + r]);
            prefetch(rows.next[r] + Row<kind>::columns_to_bytes(start));
        }
        for (int64_t c = start; c < start + matrix.group_size; c += block) {
            Vec sums[vecs];
            for (int k = 0; k < vecs; k++) sums[k] = Isa::load(y + c + k * Isa::width);
            for (int r = 0; r < count; r++) {
                Vec weights[vecs];
                decoders[r].decode(rows.codes[r] + Row<kind>::columns_to_bytes(c), weights);
                for (int k = 0; k < vecs; k++) sums[k] = Isa::add(sums[k], weights[k]);
            }
            for (int k = 0; k < vecs; k++) Isa::store(y + c + k * Isa::width, sums[k]);
        }
    }
}

template <Kind kind>
void add_rows_as_floats(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last, const float* a,
                        float* y) {
    for (; first + 4 <= last; first += 4) add_packed<kind, 4>(matrix, selection, first, last, a, y);
    for (; first < last; first++) add_packed<kind, 1>(matrix, selection, first, last, a, y);
}

// Memory of one thread for sums in integers.
struct SumMemory {
    float* factors;     // [rows_per_sum, groups + 16]: a * scale
    uint32_t *low, *high;  // [rows_per_sum / 4, groups + 16]: the bytes of 4 rows' rounded factors
    float* scales;      // [groups + 16]
    int32_t* constants;  // [groups + 16]
    int32_t* sums;      // [sum_width]

    static int64_t stride_of(const Matrix& matrix) {
        return rounded_up(groups_of(matrix.cols, matrix.group_size), 16) + 16;
    }
    static int64_t bytes_of(const Matrix& matrix) {
        return stride_of(matrix) * 4 * (rows_per_sum + rows_per_sum / 2 + 2) + 4 * sum_width(matrix);
    }
    SumMemory(const Matrix& matrix, char* at) {
        const int64_t stride = stride_of(matrix);
        factors = reinterpret_cast<float*>(at);
        low = reinterpret_cast<uint32_t*>(factors + rows_per_sum * stride);
        high = low + rows_per_sum / 4 * stride;
        scales = reinterpret_cast<float*>(high + rows_per_sum / 4 * stride);
        constants = reinterpret_cast<int32_t*>(scales + stride);
        sums = constants + stride;
    }
};

// Rounds the factors a * scale of `count` rows, group by group, to 16 bits. False where one is not finite.
template <Kind kind, typename Vectors>
bool round_factors(const Matrix& matrix, const Selection& selection, int64_t first, int64_t count, const float* a,
                   const SumMemory& memory) {
    const int64_t groups = groups_of(matrix.cols, matrix.group_size), stride = SumMemory::stride_of(matrix);
    const int64_t padded = rounded_up(count, 8);
    const uint16_t* rows[rows_per_sum];
    for (int64_t r = 0; r < count; r++) {
        rows[r] = Row<kind>(matrix, row_at(selection, first + r)).scales;
        if ((bits_of(a[first + r]) & 0x7fffffff) >= 0x7f800000) return false;
    }
    std::memset(memory.scales, 0, sizeof(float) * static_cast<size_t>(stride));
    std::memset(memory.constants, 0, sizeof(int32_t) * static_cast<size_t>(stride));
    for (int64_t g = 0; g < groups; g += 16)
        Vectors::scale_factors(rows, a + first, count, g, groups - g, memory.factors + g, stride, memory.scales + g);
    for (int64_t r = count; r < padded; r++)
        std::memset(memory.factors + r * stride, 0, sizeof(float) * static_cast<size_t>(stride));
    for (int64_t start = 0; start < groups; start += 16) {
        float inverses[16];
        for (int k = 0; k < 16; k++) {
            const float largest = memory.scales[start + k];
            if (!(largest < 3e38f)) return false;
            inverses[k] = largest > smallest_scale * whole_limit ? whole_limit / largest : 0.0f;
            memory.scales[start + k] = largest / whole_limit;
        }
        for (int64_t quad = 0; quad < padded / 4; quad++) {
            const int64_t at = quad * stride + start;
            Vectors::round_factors(memory.factors + 4 * quad * stride + start, stride, inverses, memory.low + at,
                                   memory.high + at, memory.constants + start);
        }
    }
    return true;
}

// The same sums in integers: each row times a factor that is rounded to 16 bits, relative to the largest of 64 rows.
template <Kind kind, int group_size, typename Vectors = Isa>  // a parameter: some have no such operations
void add_rows_as_integers(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last, const float* a,
                          float* y, const SumMemory& memory) {
    using Block = typename Vectors::template SumBlock<kind, group_size>;
    const Isa::Table table(matrix.table);
    const int64_t groups = groups_of(matrix.cols, group_size), padded = groups * group_size;
    const int64_t stride = SumMemory::stride_of(matrix), row_bytes = Row<kind>::columns_to_bytes(padded);
    const int64_t ahead = larger(8, rows_ahead<kind>(matrix));
    for (int64_t start = first; start < last; start += rows_per_sum) {
        const int64_t count = smaller(rows_per_sum, last - start);
        if (!round_factors<kind, Vectors>(matrix, selection, start, count, a, memory)) {
            add_rows_as_floats<kind>(matrix, selection, start, start + count, a, y);
            continue;
        }
        for (int64_t c = 0; c < padded; c += Block::columns)
            Block::start(memory.constants + c / group_size, memory.sums + c);
        for (int64_t r = 0; r < count; r += 8) {
            const uint8_t *codes[8], *next[8];
            for (int64_t k = 0; k < 8; k++) {
                const int64_t at = smaller(start + r + k, last - 1), later = smaller(start + r + k + ahead, last - 1);
                codes[k] = Row<kind>(matrix, row_at(selection, at)).codes;
                next[k] = Row<kind>(matrix, row_at(selection, later)).codes;
                // The scales of the next 64 rows are read all at once.
                const Row<kind> next_sum(matrix, row_at(selection, smaller(at + rows_per_sum, last - 1)));
                for (int64_t g = 0; g < groups; g += 32) prefetch(next_sum.scales + g);
            }
            for (int64_t c = 0; c < padded; c += Block::columns) {
                const int64_t byte = Row<kind>::columns_to_bytes(c), at = r / 4 * stride + c / group_size;
                for (const uint8_t* from : next) prefetch(from + byte);
                Block::add_8_rows(codes, byte, row_bytes - byte, table, memory.low + at, memory.high + at, stride,
                                  memory.sums + c);
            }
        }
        for (int64_t c = 0; c < padded; c += Block::columns)
            Block::finish(memory.sums + c, memory.scales + c / group_size, y + c);
    }
}

inline void add_numbers(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last, const float* a,
                        float* y) {
    const int64_t cols = matrix.cols, ahead = 1 + bytes_ahead / (2 * cols);
    const uint16_t* numbers = reinterpret_cast<const uint16_t*>(matrix.codes);
    for (int64_t at = first; at < last; at++) {
        const uint16_t* row = numbers + row_at(selection, at) * cols;
        const uint16_t* later = numbers + row_at(selection, smaller(at + ahead, last - 1)) * cols;
        const Vec factor = Isa::set1(a[at]);
        int64_t c = 0;
        for (; c + block <= cols; c += block) {
            prefetch(later + c);
            for (int64_t k = c; k < c + block; k += Isa::width)
                Isa::store(y + k, Isa::fma(factor, Isa::load(row + k), Isa::load(y + k)));
        }
        for (; c < cols; c++) y[c] += a[at] * from_bf16(row[c]);
    }
}

// y[c] += sum of a[position] * weight[position, c] over positions [first, last) of the selection. `y` [sum_width]: a
// thread's share of a sum. `memory`: SumMemory::bytes_of, read where compute is int8.
inline void add_rows(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last, const float* a,
                     Compute compute, char* memory, float* y) {
    if (first >= last) return;
    if (!matrix.scales) return add_numbers(matrix, selection, first, last, a, y);
    const auto of_kind = [&](auto which) {
        constexpr Kind kind = static_cast<Kind>(decltype(which)::value);
        if constexpr (Isa::sums_rows) {
            if (compute == int8) {
                const SumMemory sums(matrix, memory);
                if (matrix.group_size == 32) return add_rows_as_integers<kind, 32>(matrix, selection, first, last, a, y, sums);
                if (matrix.group_size == 64) return add_rows_as_integers<kind, 64>(matrix, selection, first, last, a, y, sums);
                return add_rows_as_integers<kind, 128>(matrix, selection, first, last, a, y, sums);
            }
        }
        add_rows_as_floats<kind>(matrix, selection, first, last, a, y);
    };
    if (matrix.table) {
        of_kind(Size<four_bit>());
    } else {
        of_kind(Size<eight_bit>());
    }
    if (!matrix.offsets) return;
    const int64_t groups = groups_of(matrix.cols, matrix.group_size);
    for (int64_t group = 0; group < groups; group++) {
        float sum = 0;
        for (int64_t at = first; at < last; at++)
            sum += a[at] * from_bf16(matrix.offsets[row_at(selection, at) * groups + group]);
        for (int64_t c = group * matrix.group_size; c < (group + 1) * matrix.group_size; c++) y[c] += sum;
    }
}

// For n rows of activations and of y: up to 4 rows of weights are unpacked once for all of them. Columns [start, stop).
template <Kind kind>
inline void add_unpacked(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, int64_t start,
                         int64_t stop, float* y, int64_t y_stride) {
    Isa::Decoder<kind> decoder(matrix.table);
    for (int64_t at = start; at < stop; at += tile) {
        const int64_t end = smaller(at + tile, stop);
        for (int64_t first = 0; first < selection.count; first += 4) {
            float unpacked[4][tile];
            const int64_t count = smaller(4, selection.count - first);
            for (int64_t r = 0; r < count; r++) {
                const Row<kind> row(matrix, row_at(selection, first + r));
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

// Where in a selection of a matrix's rows the first one is that is not before `row`.
inline int64_t place_of(const Selection& selection, int64_t row) {
    if (!selection.index) return smaller(row, selection.count);  // an empty index has no address either
    int64_t low = 0, high = selection.count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (selection.index[middle] < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

// One row of activations: threads share out the rows of weights, and their sums are added in the order of the threads.
// In floats they share out all rows, listed or not, so that leaving out what is zero changes no bit.
void accumulate_one(const Matrix& matrix, const Selection& selection, const float* a, Compute compute, float* out,
                    int threads) {
    const int64_t cols = matrix.cols, width = sum_width(matrix), memory_bytes = SumMemory::bytes_of(matrix);
    threads = useful_threads(threads, (compute == fp32 ? matrix.rows : selection.count) * width);
    Buffer<float> sums(threads * width);
    Buffer<char> memory(Isa::sums_rows && compute == int8 ? threads * memory_bytes : 0);
    int64_t team = 1;
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = thread_number();
#pragma omp single
        team = team_size();
        float* y = sums.data + thread * width;
        std::memset(y, 0, sizeof(float) * static_cast<size_t>(width));
        const auto start = [&](int64_t part) {
            return compute == fp32 ? place_of(selection, matrix.rows * part / team) : selection.count * part / team;
        };
        add_rows(matrix, selection, start(thread), start(thread + 1), a, compute, memory.data + thread * memory_bytes, y);
    }
    for (int64_t c = 0; c < cols; c++) {
        float total = sums.data[c];
        for (int64_t thread = 1; thread < team; thread++) total += sums.data[thread * width + c];
        out[c] = total;
    }
}

// Several rows: threads share out columns, so that each column is summed in the order of the rows.
template <Kind kind>
void accumulate_many(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, float* out,
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
        add_unpacked<kind>(matrix, selection, a, n, start, stop, y, padded);
    }
    if (padded == cols) return;
    for (int64_t i = 0; i < n; i++)
        std::memcpy(out + i * cols, y + i * padded, static_cast<size_t>(cols) * sizeof(float));
}

void accumulate(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, Compute compute,
                float* out, int threads) {
    if (n == 1 || !matrix.scales) {
        for (int64_t i = 0; i < n; i++)
            accumulate_one(matrix, selection, a + i * selection.count, compute, out + i * matrix.cols, threads);
    } else if (matrix.table) {
        accumulate_many<four_bit>(matrix, selection, a, n, out, threads);
    } else {
        accumulate_many<eight_bit>(matrix, selection, a, n, out, threads);
    }
}

}  // namespace
}  // namespace hf_sparse
