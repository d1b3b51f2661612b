// The loops of every operator (in the files included at the end), written once over the vector operations of `Isa`,
// which the including unit defines first:
//
//   Vec, width                       a register of `width` floats; 32 columns are vecs = 32 / width registers
//   zero set1 store add mul fma sum  the usual; load takes floats, bfloat16 or signed bytes; none needs alignment
//   Decoder<kind>                    scale(s), then decode(codes of 32 columns, Vec[vecs]): value * s
//   IntegerBlock<kind, group>        `columns` columns of one or several `groups`: prepare(numbers of -32512..32512, x)
//                                    brings activations into the order in which weights are held, two bytes a column;
//                                    load(codes, bytes present, Table), then dot(x): sums of products of weight + bias,
//                                    as floats, whose scales are lanes(scales of the groups)
//   mul_scales(bfloat16 scales, floats, corrections, count up to 16, out, sums)   products of the first two to `out`;
//                                    returns sums + out * corrections
//   store_sums(a, b, c, d, out)      the sums of four registers
//   keep(below, x, first, last, to)  places of x[first .. last) whose magnitude is not below their threshold (NaN is not)
//                                    -> to; returns how many
//   sums_rows                        whether there is a SumBlock, see accumulate.h
//
// All of it has internal linkage: the same template compiled for another instruction set is another function. For that
// reason too nothing of the standard library that is inline may be called here.
#pragma once

#include <cmath>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "buffer.h"
#include "kernels.h"

namespace hf_sparse {
namespace {

using Vec = Isa::Vec;
constexpr int vecs = Isa::vecs;
constexpr int64_t block = 32;                    // columns decoded at a time
constexpr int64_t tile = 1024;                   // columns of unpacked rows that stay in the first-level cache
constexpr int64_t weights_per_thread = 1 << 14;  // less is not worth another thread
constexpr int64_t bytes_ahead = 4096;            // of a matrix that are being fetched while others are multiplied
constexpr int64_t block_columns = 128;           // most that an IntegerBlock or SumBlock takes
constexpr int64_t short_row = 2048;              // columns
constexpr float smallest_scale = 0x1p-126f;
constexpr uint32_t limit_bits = 0x7f000000;              // 2^127
constexpr uint32_t limit_bits_with_offset = 0x7e800000;  // 2^126

inline int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

inline int team_size() {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

inline int64_t groups_of(int64_t cols, int64_t group_size) { return (cols + group_size - 1) / group_size; }

inline int useful_threads(int threads, int64_t weights) {
    return static_cast<int>(smaller(threads, 1 + weights / weights_per_thread));
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float from_bf16(uint16_t value) { return from_bits(static_cast<uint32_t>(value) << 16); }

// To nearest, half to even. Not for NaN.
inline uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Nearest whole number of -limit..limit, half to even: adding 1.5 * 2^23 leaves no fraction.
inline float to_whole(float value, float limit) {
    value = value > limit ? limit : value;
    value = value > -limit ? value : -limit;  // NaN goes here too, for it has no whole number
    return (value + 12582912.0f) - 12582912.0f;
}

inline float round_to_bf16(float value) {
    const uint32_t magnitude = bits_of(value) & 0x7fffffff;
    return magnitude < 0x7f800000 ? from_bf16(to_bf16(value)) : value;
}

inline uint32_t largest_magnitude_bits(const float* values, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t magnitude = bits_of(values[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

template <int value_>
struct Size {
    static constexpr int value = value_;
};

inline int64_t row_at(const Selection& selection, int64_t position) {
    return selection.index ? selection.index[position] : position;
}

// One row of packed weights.
template <Kind kind>
struct Row {
    const uint8_t* codes;
    const uint16_t* scales;
    const uint16_t* offsets;
    Row(const Matrix& matrix, int64_t row) {
        const int64_t groups = groups_of(matrix.cols, matrix.group_size);
        codes = matrix.codes + row * columns_to_bytes(groups * matrix.group_size);
        scales = matrix.scales + row * groups;
        offsets = matrix.offsets ? matrix.offsets + row * groups : nullptr;
    }
    static int64_t columns_to_bytes(int64_t columns) { return kind == four_bit ? columns / 2 : columns; }
};

// How many rows ahead of the one being multiplied are fetched: a row is short, so the processor's own prefetcher sees
// its end too late, and where the next one starts not at all.
template <Kind kind>
inline int64_t rows_ahead(const Matrix& matrix) {
    const int64_t padded = groups_of(matrix.cols, matrix.group_size) * matrix.group_size;
    return 1 + bytes_ahead / Row<kind>::columns_to_bytes(padded);
}

inline void prefetch(const void* from) { __builtin_prefetch(from, 0, 2); }  // to the second-level cache

// `count` consecutive rows of a selection, and the codes of those that are fetched meanwhile.
template <Kind kind, int count>
struct Rows {
    const uint8_t* codes[count];
    const uint16_t* scales[count];
    const uint8_t* next[count];
    Rows(const Matrix& matrix, const Selection& selection, int64_t first, int64_t last, int64_t ahead) {
        for (int r = 0; r < count; r++) {
            const Row<kind> row(matrix, row_at(selection, first + r));
            codes[r] = row.codes;
            scales[r] = row.scales;
            const Row<kind> later(matrix, row_at(selection, smaller(first + r + ahead, last - 1)));
            next[r] = later.codes;
            for (int64_t group = 0; group < groups_of(matrix.cols, matrix.group_size); group += 32)
                prefetch(later.scales + group);
        }
    }
};

// Columns [start, stop), whole groups, of one row as floats.
template <Kind kind>
inline void decode_columns(const Row<kind>& row, Isa::Decoder<kind>& decoder, int64_t start, int64_t stop,
                           int64_t group_size, float* out) {
    for (int64_t c = start; c < stop; c += block) {
        if (c % group_size == 0) decoder.scale(from_bf16(row.scales[c / group_size]));
        Vec weights[vecs];
        decoder.decode(row.codes + Row<kind>::columns_to_bytes(c), weights);
        if (row.offsets) {
            const Vec offset = Isa::set1(from_bf16(row.offsets[c / group_size]));
            for (int k = 0; k < vecs; k++) weights[k] = Isa::add(weights[k], offset);
        }
        for (int k = 0; k < vecs; k++) Isa::store(out + (c - start) + k * Isa::width, weights[k]);
    }
}

}  // namespace
}  // namespace hf_sparse

#include "activations.h"
#include "row_product.h"
#include "accumulate.h"
#include "input_product.h"
#include "packing.h"
#include "decode.h"
