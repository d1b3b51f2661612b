// Weights to tiles of bfloat16, for amx.cpp. A weight is value * scale, plus the group's offset if there is one, and
// rounded to nearest even.
#pragma once

#include "amx_tiles.h"

namespace hf_sparse {
namespace {

enum class Kind { four_bit, eight_bit, numbers };

inline int64_t row_at(const Selection& selection, int64_t position) {
    return selection.index ? selection.index[position] : position;
}

template <Kind kind, bool with_offsets>
struct WeightRow {
    const uint8_t* codes;
    const uint16_t* scales;
    const uint16_t* offsets;

    static __m512 widen(uint16_t value) {
        return _mm512_castsi512_ps(_mm512_maskz_set1_epi16(0xaaaaaaaa, static_cast<int16_t>(value)));
    }

    __m512 scaled(__m512 values, int64_t group) const {
        const __m512 products = _mm512_mul_ps(values, widen(scales[group]));  // exact
        if constexpr (with_offsets) return _mm512_add_ps(products, widen(offsets[group]));
        return products;
    }

    // 16 weights of 8 bits from `column`.
    __m512 eight_bit(int64_t column, int64_t group) const {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + column));
        return scaled(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), group);
    }

    // The 16 bytes of the 32 weights of 4 bits from `column`.
    __m128i four_bit(int64_t column) const {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + column / 2));
    }

    // 32 numbers from `column`, zeros beyond the row.
    __m512i numbers(int64_t column, int64_t cols) const {
        return _mm512_maskz_loadu_epi16(first_32(cols - column), codes + column * 2);
    }
};

// The rows of a matrix. Where a row begins is found without a division.
template <Kind kind, bool with_offsets>
struct WeightRows {
    const Matrix& matrix;
    const int64_t groups, row_bytes;

    explicit WeightRows(const Matrix& matrix)
        : matrix(matrix), groups(kind == Kind::numbers ? 0 : quotient_up(matrix.cols, matrix.group_size)),
          row_bytes(bytes(kind == Kind::numbers ? matrix.cols : groups * matrix.group_size)) {}

    static int64_t bytes(int64_t columns) {
        return kind == Kind::four_bit ? columns / 2 : kind == Kind::eight_bit ? columns : columns * 2;
    }

    WeightRow<kind, with_offsets> at(int64_t row) const {
        return {matrix.codes + row * row_bytes, matrix.scales + row * groups,
                with_offsets ? matrix.offsets + row * groups : nullptr};
    }

    int64_t group_of(int64_t column) const { return kind == Kind::numbers ? 0 : column / matrix.group_size; }

    int64_t group_end(int64_t group, int64_t end) const {
        return kind == Kind::numbers ? end : smaller((group + 1) * matrix.group_size, end);
    }

    // Brings the codes of columns [start, stop) of a row closer.
    void prefetch(int64_t row, int64_t start, int64_t stop) const {
        const uint8_t* codes = matrix.codes + row * row_bytes;
        for (int64_t i = bytes(start); i < bytes(stop); i += 64) _mm_prefetch(codes + i, _MM_HINT_T0);
    }
};

inline __m512 table_values(const Matrix& matrix) {
    if (!matrix.table) return _mm512_setzero_ps();
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(matrix.table));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Rows of a selection from `first` as A tiles: `tiles` times 16 rows, each with `depth` tiles of 32 columns from tile
// `start`. Of the 16 * tiles rows, [line, stop_line) only. Missing rows are zeros.
template <Kind kind, bool with_offsets>
void decode_as_a(const Matrix& matrix, const Selection& selection, int64_t first, int64_t tiles, int64_t start,
                 int64_t depth, int64_t line, int64_t stop_line, uint8_t* to) {
    const __m512 values = table_values(matrix);
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const int64_t end = smaller((start + depth) * tile_depth, matrix.cols);
    const WeightRows<kind, with_offsets> rows(matrix);
    const int64_t first_group = rows.group_of(start * tile_depth);
    const int64_t ahead = tiles * tile_side;  // to the same row of the next block
    for (int64_t i = line; i < stop_line; i++) {
        uint8_t* at = to + i / tile_side * depth * tile_bytes + i % tile_side * 64;
        if (first + i >= selection.count) {
            for (int64_t k = 0; k < depth; k++) _mm512_store_si512(at + k * tile_bytes, _mm512_setzero_si512());
            continue;
        }
        const WeightRow<kind, with_offsets> row = rows.at(row_at(selection, first + i));
        if (first + i + ahead < selection.count)
            rows.prefetch(row_at(selection, first + i + ahead), start * tile_depth, end);
        int64_t column = start * tile_depth;
        for (int64_t group = first_group; column < end; group++) {
            const int64_t stop = rows.group_end(group, end);
            __m512i table = _mm512_setzero_si512();
            if constexpr (kind == Kind::four_bit)
                table = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(row.scaled(values, group)));
            for (; column < stop; column += tile_depth, at += tile_bytes) {
                __m512i weights;
                if constexpr (kind == Kind::four_bit) {
                    // The lookup reads five bits: the table stands there twice, so that the fifth does not matter.
                    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(row.four_bit(column)));
                    weights = _mm512_permutexvar_epi16(_mm512_srlv_epi16(bytes, shifts), table);
                } else if constexpr (kind == Kind::eight_bit) {
                    weights = round_pair(row.eight_bit(column, group), row.eight_bit(column + 16, group));
                } else {
                    weights = row.numbers(column, matrix.cols);
                }
                // What pads a row is not zero where there is an offset.
                if (column + tile_depth > end)
                    weights = _mm512_maskz_mov_epi16(first_32(end - column), weights);
                _mm512_store_si512(at, weights);
            }
        }
    }
}

// Words even, odd, even + 1, odd + 1, ...
inline __m512i alternating(int32_t even, int32_t odd) {
    const __m512i counts = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i both = _mm512_or_si512(counts, _mm512_slli_epi32(counts, 16));
    return _mm512_add_epi16(both, _mm512_set1_epi32(odd << 16 | even));
}

// Columns from `first` of the rows of a selection as B tiles: `tiles` times 16 columns, rounded up to pairs of tiles,
// each with `depth` tiles of 32 rows from tile `start`. Of the 16 * depth pairs of rows, [line, stop_line) only.
// Missing rows are zeros; missing columns are anything.
template <Kind kind, bool with_offsets>
void decode_as_b(const Matrix& matrix, const Selection& selection, int64_t first, int64_t tiles, int64_t start,
                 int64_t depth, int64_t line, int64_t stop_line, uint8_t* to) {
    const WeightRows<kind, with_offsets> rows(matrix);
    const __m512 values = table_values(matrix);
    const __m512i odd_words = _mm512_set1_epi32(0x00100000);  // words of the second row look into the second table
    const __m512i nibble = _mm512_set1_epi16(15);
    const __m512i low_pairs = alternating(0, 32), high_pairs = alternating(16, 48), halves = alternating(0, 16);
    const int64_t end = first + quotient_up(tiles, 2) * 2 * tile_side;
    const int64_t first_group = rows.group_of(first);
    const int64_t step = depth * tile_bytes;
    for (int64_t i = line; i < stop_line; i++) {
        const int64_t position = 2 * (start * tile_side + i);
        uint8_t* at = to + i * 64;
        if (position >= selection.count) {
            for (int64_t j = 0; j < tiles; j++) _mm512_store_si512(at + j * step, _mm512_setzero_si512());
            continue;
        }
        const WeightRow<kind, with_offsets> low = rows.at(row_at(selection, position));
        const bool single = position + 1 == selection.count;
        const WeightRow<kind, with_offsets> high = single ? low : rows.at(row_at(selection, position + 1));
        int64_t column = first;
        for (int64_t group = first_group; column < end; group++) {
            const int64_t stop = rows.group_end(group, end);
            __m512i table = _mm512_setzero_si512();
            if constexpr (kind == Kind::four_bit)
                table = round_pair(low.scaled(values, group), high.scaled(values, group));
            for (; column < stop; column += 32, at += 2 * step) {
                __m512i left, right;  // 16 columns each
                if constexpr (kind == Kind::four_bit) {
                    const __m128i a = low.four_bit(column), b = high.four_bit(column);
                    const __m256i bytes = _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b));
                    const __m512i words = _mm512_cvtepu8_epi16(bytes);
                    const __m512i left_codes = _mm512_or_si512(_mm512_and_si512(words, nibble), odd_words);
                    const __m512i right_codes = _mm512_or_si512(_mm512_srli_epi16(words, 4), odd_words);
                    left = _mm512_permutexvar_epi16(left_codes, table);
                    right = _mm512_permutexvar_epi16(right_codes, table);
                } else if constexpr (kind == Kind::eight_bit) {
                    const __m512i first_half = round_pair(low.eight_bit(column, group), high.eight_bit(column, group));
                    const __m512i second_half =
                        round_pair(low.eight_bit(column + 16, group), high.eight_bit(column + 16, group));
                    left = _mm512_permutexvar_epi16(halves, first_half);
                    right = _mm512_permutexvar_epi16(halves, second_half);
                } else {
                    const __m512i a = low.numbers(column, matrix.cols), b = high.numbers(column, matrix.cols);
                    left = _mm512_permutex2var_epi16(a, low_pairs, b);
                    right = _mm512_permutex2var_epi16(a, high_pairs, b);
                }
                if (single) {
                    left = _mm512_maskz_mov_epi16(0x55555555, left);
                    right = _mm512_maskz_mov_epi16(0x55555555, right);
                }
                _mm512_store_si512(at, left);
                _mm512_store_si512(at + step, right);
            }
        }
    }
}

}  // namespace
}  // namespace hf_sparse
