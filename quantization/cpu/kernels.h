// What the kernels of one instruction set offer. Addresses are checked by the caller; sizes are in elements unless said
// otherwise.
//
// Everything here is plain data: a function defined in this header could be compiled with one unit's instruction set
// and be linked into all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hf_sparse {

// Weights as quantization/codebooks.py describes the layout. Three kinds: 4-bit codes (a table), 8-bit codes (no table),
// bfloat16 numbers (no scales either).
struct Matrix {
    const uint8_t* codes;     // [rows, padded columns / 2]; int8 [rows, padded columns]; bfloat16 [rows, columns]
    const uint16_t* scales;   // bfloat16 [rows, groups]; null: `codes` are numbers
    const uint16_t* offsets;  // bfloat16 [rows, groups], added to every weight of the group; null: none
    const int8_t* table;      // [16], the values of 4-bit codes; null: a code is its value
    int64_t rows;
    int64_t cols;
    int64_t group_size;  // 32, 64 or 128
};

// Rows of a matrix: index[0..count), or 0..count-1 where index is null.
struct Selection {
    const int64_t* index;
    int64_t count;
};

// How a group's scale and codes are chosen.
struct Rule {
    const float* thresholds;  // [15], ascending; null: round to a signed byte
    float divisor;
    bool signed_peak;
};

struct Kernels {
    // weight [rows, cols] -> codes and scales. False where a weight is NaN, infinite or beyond +-2^127.
    bool (*quantize)(const float* weight, int64_t rows, int64_t cols, int64_t group_size, const Rule& rule,
                     uint8_t* codes, uint16_t* scales, int threads);
    // -> out [selection.count, cols], float or bfloat16.
    void (*dequantize)(const Matrix& matrix, const Selection& selection, void* out, bool bf16, int threads);
    // x [n, cols] -> out [n, selection.count]. `integer`: x is rounded to int8 by group and multiplied in integers.
    void (*row_product)(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, bool integer,
                        float* out, int threads);
    // a [n, selection.count] -> out [n, cols].
    void (*accumulate)(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, float* out,
                       int threads);
};

extern const Kernels portable_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;

// The products of many rows of activations, on CPUs with AMX: x and a, and every weight, are rounded to bfloat16 and
// products summed in float32. Offsets go with scales only. Only where amx_available().
void amx_row_product(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, float* out,
                     int threads);
void amx_accumulate(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, float* out,
                    int threads);
bool amx_available();  // asks the system for the use of AMX the first time

// 64-byte aligned memory. Throws std::bad_alloc.
void* allocate(size_t bytes);
void release(void* memory);

}  // namespace hf_sparse
