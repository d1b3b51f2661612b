// The loops of every operator (in the files included at the end), written once over the vector operations of `Isa`,
// which the including unit defines first:
//
//   Vec, width                        a register of `width` floats; 32 columns are vecs = 32 / width registers   zero
// set1 load store add fma sum  the usual; load and store need no alignment   Decoder<four_bit>
// scale(s), then decode(codes of 32 columns, Vec[vecs]): value * s   IntegerGroup<four_bit, group>     load(codes of a
// group, Table), then dot(x int8, corrections): sums of products, as float lanes.
// prepare(x, corrections) once before: brings the int8 activations of a group into the order
// in which the weights are held, and fills `corrections` numbers that dot() adds
//
// All of it has internal linkage: the same template compiled for another instruction set is another function. For that
// reason too nothing of the standard library that is inline may be called here.
#pragma once

#include <cmath>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels.h"

namespace hf_sparse {
namespace {

using Vec = Isa::Vec;
constexpr int vecs = Isa::vecs;
constexpr int64_t block = 32;                    // columns decoded at a time
constexpr int64_t tile = 1024;                   // columns of unpacked rows that stay in the first-level cache
constexpr int64_t weights_per_thread = 1 << 14;  // less is not worth another thread
constexpr float smallest_scale = 0x1p-126f;
constexpr uint32_t limit_bits = 0x7f000000;  // 2^127

inline int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

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

// Nearest whole number of -127..127, half to even: adding 1.5 * 2^23 leaves no fraction.
inline float to_signed_byte(float value) {
    value = value > 127.0f ? 127.0f : value;
    value = value > -127.0f ? value : -127.0f;  // NaN goes here too, for it has no whole number
    return (value + 12582912.0f) - 12582912.0f;
}

inline uint32_t largest_magnitude_bits(const float* values, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint32_t magnitude = bits_of(values[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

template <typename T>
struct Buffer {
    T* data;
    explicit Buffer(int64_t count) : data(static_cast<T*>(allocate(static_cast<size_t>(count) * sizeof(T)))) {}
    ~Buffer() { release(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
};

inline int64_t row_at(const Selection& selection, int64_t position) {
    return selection.index ? selection.index[position] : position;
}

// One row of packed weights.
template <bool four_bit>
struct Row {
    const uint8_t* codes;
    const uint16_t* scales;
    Row(const Matrix& matrix, int64_t row) {
        const int64_t groups = groups_of(matrix.cols, matrix.group_size);
        codes = matrix.codes + row * columns_to_bytes(groups * matrix.group_size);
        scales = matrix.scales + row * groups;
    }
    static int64_t columns_to_bytes(int64_t columns) { return four_bit ? columns / 2 : columns; }
};

// `count` consecutive rows of a selection, and the codes of as many after them (the last again at the end), which are
// fetched into the cache meanwhile: a row is short, so the processor's own prefetcher sees its end too late, and where
// the next one starts not at all.
template <bool four_bit, int count>
struct Rows {
    const uint8_t* codes[count];
    const uint16_t* scales[count];
    const uint8_t* next[count];
    Rows(const Matrix& matrix, const Selection& selection, int64_t first) {
        for (int r = 0; r < count; r++) {
            const Row<four_bit> row(matrix, row_at(selection, first + r));
            codes[r] = row.codes;
            scales[r] = row.scales;
            next[r] = Row<four_bit>(matrix, row_at(selection, smaller(first + count + r, selection.count - 1))).codes;
        }
    }
};

// Columns [start, stop), whole groups, of one row as floats.
template <bool four_bit>
inline void decode_columns(const Row<four_bit>& row, Isa::Decoder<four_bit>& decoder, int64_t start, int64_t stop,
                           int64_t group_size, float* out) {
    for (int64_t c = start; c < stop; c += block) {
        if (c % group_size == 0) decoder.scale(from_bf16(row.scales[c / group_size]));
        Vec weights[vecs];
        decoder.decode(row.codes + Row<four_bit>::columns_to_bytes(c), weights);
        for (int k = 0; k < vecs; k++) Isa::store(out + (c - start) + k * Isa::width, weights[k]);
    }
}

}  // namespace
}  // namespace hf_sparse

#include "accumulate.h"
#include "packing.h"
#include "row_product.h"
