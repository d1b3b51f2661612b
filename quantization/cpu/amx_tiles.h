// Tiles: 16 rows of 64 bytes, which one instruction multiplies as bfloat16 pairs, with sums in float32.
//
//   C [16, 16] += A [16, 32] * B [32, 16]
//
// A lies by rows. In B two consecutive rows are interleaved: row k of the tile holds (B[2k, j], B[2k + 1, j]) for every
// j. Here a tile in memory is 1024 consecutive bytes.
//
// Subnormal numbers count as zero in the product.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace hf_sparse {
namespace {

constexpr int64_t tile_bytes = 1024;
constexpr int64_t tile_floats = 256;
constexpr int64_t tile_side = 16;   // rows and columns of C
constexpr int64_t tile_depth = 32;  // products that one instruction sums for each

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The size, at most `most`, of as few parts of `total` as possible, all about as large. `total` is positive.
inline int64_t even_share(int64_t total, int64_t most) { return quotient_up(total, quotient_up(total, most)); }

inline __mmask16 first_16(int64_t count) {
    return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

inline __mmask32 first_32(int64_t count) {
    return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (1u << count) - 1;
}

// The tile registers of this thread: all of the full size, in use for as long as this lives.
struct TileRegisters {
    TileRegisters() {
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } config = {};
        config.palette = 1;
        for (int i = 0; i < 8; i++) {
            config.row_bytes[i] = 64;
            config.rows[i] = 16;
        }
        // GCC 12 takes the instruction to read a part only and drops the stores to the rest.
        __asm__ volatile("" : : "m"(config) : "memory");
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
};

// c[i][j] (+)= sum over `depth` tiles of a[i] * b[j], for i < a_tiles and j < b_tiles (1 or 2): tiles of one i or j
// follow each other, a_step or b_step bytes lie between those of one i or j and the next.
// Meanwhile the cache is asked for the 32 x 32 outputs from `out`, which will be written next; null: none will.
template <int a_tiles, int b_tiles>
inline void multiply(const uint8_t* a, int64_t a_step, const uint8_t* b, int64_t b_step, int64_t depth, float* c,
                     bool add, const float* out, int64_t out_stride) {
    constexpr int64_t row = 64;
    const int64_t asking = out ? 16 : 0;
    if (add) {
        _tile_loadd(0, c, row);
        if constexpr (b_tiles == 2) _tile_loadd(1, c + tile_floats, row);
        if constexpr (a_tiles == 2) _tile_loadd(2, c + b_tiles * tile_floats, row);
        if constexpr (a_tiles == 2 && b_tiles == 2) _tile_loadd(3, c + 3 * tile_floats, row);
    } else {
        _tile_zero(0);
        if constexpr (b_tiles == 2) _tile_zero(1);
        if constexpr (a_tiles == 2) _tile_zero(2);
        if constexpr (a_tiles == 2 && b_tiles == 2) _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k++, a += tile_bytes, b += tile_bytes) {
        if (k < asking) {
            for (int i = 0; i < 2; i++, out += out_stride) {
                _mm_prefetch(out, _MM_HINT_ET0);
                _mm_prefetch(out + 16, _MM_HINT_ET0);
            }
        }
        _tile_loadd(4, a, row);
        _tile_loadd(6, b, row);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (b_tiles == 2) {
            _tile_loadd(7, b + b_step, row);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (a_tiles == 2) {
            _tile_loadd(5, a + a_step, row);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (b_tiles == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, row);
    if constexpr (b_tiles == 2) _tile_stored(1, c + tile_floats, row);
    if constexpr (a_tiles == 2) _tile_stored(2, c + b_tiles * tile_floats, row);
    if constexpr (a_tiles == 2 && b_tiles == 2) _tile_stored(3, c + 3 * tile_floats, row);
}

// 16 x 16 numbers of 4 bytes.
inline void transpose(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        r[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
        r[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
    }
}

inline __m512i round_pair(__m512 low, __m512 high) {
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// One tile of activations: 32 columns from `column` of 16 rows from `row` of x [n, cols], zeros beyond. For an A tile
// as they lie; for a B tile (`turned`) a row becomes a column.
template <bool turned>
inline void pack_tile(const float* x, int64_t n, int64_t cols, int64_t row, int64_t column, uint8_t* to) {
    const __mmask16 low = first_16(cols - column), high = first_16(cols - column - 16);
    __m512i rows[16];
    for (int i = 0; i < 16; i++) {
        if (row + i >= n) {
            rows[i] = _mm512_setzero_si512();
            continue;
        }
        const float* from = x + (row + i) * cols + column;
        rows[i] = round_pair(_mm512_maskz_loadu_ps(low, from), _mm512_maskz_loadu_ps(high, from + 16));
    }
    if constexpr (turned) transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + 64 * i, rows[i]);
}

// A tile of sums to out[row ..., column ...], of which `rows` and `columns` exist.
template <bool turned>
inline void write_tile(const float* c, int64_t rows, int64_t columns, float* out, int64_t stride) {
    __m512i values[16];
    for (int i = 0; i < 16; i++) values[i] = _mm512_load_si512(c + 16 * i);
    if constexpr (turned) transpose(values);
    const __mmask16 mask = first_16(columns);
    if (rows >= 16) {
        for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(out + i * stride, mask, values[i]);
    } else {
        for (int64_t i = 0; i < rows; i++) _mm512_mask_storeu_epi32(out + i * stride, mask, values[i]);
    }
}

}  // namespace
}  // namespace hf_sparse
