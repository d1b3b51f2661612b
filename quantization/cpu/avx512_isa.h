// AVX-512 with VNNI: 16 floats a register, 64 products of bytes an instruction.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "kernels.h"

namespace hf_sparse {
namespace {

struct Isa {
    using Vec = __m512;
    static constexpr int width = 16, vecs = 2;

    static Vec zero() { return _mm512_setzero_ps(); }
    static Vec set1(float value) { return _mm512_set1_ps(value); }
    static Vec load(const float* from) { return _mm512_loadu_ps(from); }
    static Vec load(const uint16_t* bf16) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bf16));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    static Vec load(const int8_t* bytes) {
        return _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
    }
    static void store(float* to, Vec value) { _mm512_storeu_ps(to, value); }
    static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum(Vec value) { return _mm512_reduce_add_ps(value); }
    static void store_sums(Vec a, Vec b, Vec c, Vec d, float* out) {
        const auto half = [](Vec v) {
            return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
        };
        const __m256 ab = _mm256_hadd_ps(half(a), half(b)), cd = _mm256_hadd_ps(half(c), half(d));
        const __m256 all = _mm256_hadd_ps(ab, cd);
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
    }
    static __m512 scales_of(const uint16_t* bf16, __mmask16 present) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(present, bf16));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static __mmask16 first(int64_t count) { return static_cast<__mmask16>(count >= 16 ? 0xffff : (1 << count) - 1); }
    static Vec mul_scales(const uint16_t* scales, const float* by, const float* corrections, int64_t count, float* out,
                          Vec sums) {
        const __mmask16 present = first(count);
        const Vec products = _mm512_mul_ps(scales_of(scales, present), _mm512_maskz_loadu_ps(present, by));
        _mm512_storeu_ps(out, products);
        return _mm512_fmadd_ps(products, _mm512_maskz_loadu_ps(present, corrections), sums);
    }
    static void pause() { _mm_pause(); }
    static int64_t keep(const float* below, const float* x, int64_t first, int64_t last, int64_t* to) {
        int64_t count = 0;
        __m512i places = _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
        for (int64_t i = first; i < last; i += 16) {
            const __mmask16 present = Isa::first(last - i);
            const __m512 magnitudes = _mm512_abs_ps(_mm512_maskz_loadu_ps(present, x + i));
            const __m512 thresholds = _mm512_maskz_loadu_ps(present, below + i);
            const __mmask16 kept = _mm512_mask_cmp_ps_mask(present, magnitudes, thresholds, _CMP_NLT_UQ);
            for (int half = 0; half < 2; half++) {
                const __mmask8 of_half = static_cast<__mmask8>(kept >> 8 * half);
                _mm512_mask_compressstoreu_epi64(to + count, of_half, places);
                count += __builtin_popcount(of_half);
                places = _mm512_add_epi64(places, _mm512_set1_epi64(8));
            }
        }
        return count;
    }

    template <Kind kind>
    struct Decoder;

    // The product instruction takes unsigned times signed bytes: values are held plus this.
    static constexpr float bias = 128;

    struct Table {
        __m512i values = _mm512_setzero_si512();
        explicit Table(const int8_t* table) {
            if (!table) return;
            const __m128i plain = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
            values = _mm512_broadcast_i32x4(_mm_xor_si128(plain, _mm_set1_epi8(-128)));
        }
        // The values of codes in the low four bits of each byte; what is above them does not matter.
        __m512i look_up(__m512i codes) const {
#ifdef __AVX512VBMI__
            return _mm512_permutexvar_epi8(codes, values);  // the table lies there four times: bits 4 and 5 choose one
#else
            return _mm512_shuffle_epi8(values, _mm512_and_si512(codes, _mm512_set1_epi8(15)));
#endif
        }
    };

    // Low and high signed bytes of 64 numbers of -32512..32512: number = 256 * high + low.
    static void split(const int16_t* numbers, __m512i* low, __m512i* high) {
        __m256i lows[2], highs[2];
        for (int i = 0; i < 2; i++) {
            const __m512i all = _mm512_loadu_si512(numbers + 32 * i);
            const __m512i upper = _mm512_srai_epi16(_mm512_add_epi16(all, _mm512_set1_epi16(128)), 8);
            highs[i] = _mm512_cvtepi16_epi8(upper);
            lows[i] = _mm512_cvtepi16_epi8(_mm512_sub_epi16(all, _mm512_slli_epi16(upper, 8)));
        }
        *low = _mm512_inserti64x4(_mm512_castsi256_si512(lows[0]), lows[1], 1);
        *high = _mm512_inserti64x4(_mm512_castsi256_si512(highs[0]), highs[1], 1);
    }

    // One 4-byte number per group -> the lanes of its group: 1, 2 or 4 groups share the four 16-byte lanes.
    template <int groups>
    static __m512i spread(const void* numbers) {
        if constexpr (groups == 4) {
            const __m512i all = _mm512_castsi128_si512(_mm_loadu_si128(static_cast<const __m128i*>(numbers)));
            return _mm512_permutexvar_epi32(
                _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0), all);
        } else {
            const int* words = static_cast<const int*>(numbers);
            const __m512i all = _mm512_set1_epi32(words[0]);
            return groups == 1 ? all : _mm512_mask_set1_epi32(all, 0xff00, words[1]);
        }
    }

    // Columns multiplied at a time: 64 bytes of codes. 4-bit: 128 columns, of which the low nibbles of lane L are columns
    // 32 L .. 32 L + 15, the high nibbles the 16 after them, so that a lane belongs to one group. 8-bit: 64 columns, or a
    // group of 128.
    template <Kind kind, int group_size>
    struct IntegerBlock {
        static constexpr int columns = kind == four_bit || group_size == 128 ? 128 : 64;
        static constexpr int groups = columns / group_size;
        static constexpr int bytes = kind == four_bit ? 64 : columns;
        __m512i weights[columns / 64];

        // `present`: bytes that are there, fewer than a block's at the end of a row.
        void load(const uint8_t* codes, int64_t present, const Table& table) {
            for (int i = 0; i < bytes / 64; i++) {
                const __m512i part = present >= bytes
                                         ? _mm512_loadu_si512(codes + 64 * i)
                                         : _mm512_maskz_loadu_epi8((__mmask64(1) << present) - 1, codes + 64 * i);
                if constexpr (kind == four_bit) {
                    weights[0] = table.look_up(part);
                    weights[1] = table.look_up(_mm512_srli_epi16(part, 4));
                } else {
                    weights[i] = _mm512_xor_si512(part, _mm512_set1_epi8(-128));
                }
            }
        }

        // For each 64 weights held: their low bytes, then their high bytes.
        static void prepare(const int16_t* numbers, int8_t* x) {
            for (int i = 0; i < columns / 64; i++) {
                int16_t ordered[64];
                for (int c = 0; c < 64; c++)
                    ordered[c] = kind == four_bit ? numbers[c / 16 * 32 + 16 * i + c % 16] : numbers[64 * i + c];
                __m512i low, high;
                split(ordered, &low, &high);
                _mm512_storeu_si512(x + 128 * i, low);
                _mm512_storeu_si512(x + 128 * i + 64, high);
            }
        }

        Vec dot(const int8_t* x) const {
            __m512i sums = _mm512_setzero_si512();
            for (int i = 0; i < columns / 64; i++)
                sums = _mm512_dpbusd_epi32(sums, weights[i], _mm512_loadu_si512(x + 128 * i + 64));
            sums = _mm512_slli_epi32(sums, 8);
            for (int i = 0; i < columns / 64; i++)
                sums = _mm512_dpbusd_epi32(sums, weights[i], _mm512_loadu_si512(x + 128 * i));
            return _mm512_cvtepi32_ps(sums);
        }

        // The scale of each lane, from those of the block's groups.
        static Vec lanes(const float* scales) {
            if constexpr (groups != 2) return _mm512_castsi512_ps(spread<groups>(scales));
            double pair;  // a load and a permutation: the units that multiply are left alone
            std::memcpy(&pair, scales, sizeof pair);
            const __m512i which = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
            return _mm512_permutevar_ps(_mm512_castpd_ps(_mm512_set1_pd(pair)), which);
        }
    };

    // Sums of rows in integers: 8 rows of 64 bytes at a time, each row times a factor of 16 bits. The product instruction
    // wants 4 rows side by side, so their bytes are interleaved, before codes are looked up; what is accumulated stays
    // in that order.
    static constexpr bool sums_rows = true;

    // Largest magnitudes among up to 16 groups of `rows` rows' a * scale, which go to `factors` [rows, stride].
    static void scale_factors(const uint16_t* const* scales, const float* a, int64_t rows, int64_t start, int64_t count,
                              float* factors, int64_t stride, float* largest) {
        const __mmask16 present = first(count);
        __m512 most = _mm512_setzero_ps();
        for (int64_t r = 0; r < rows; r++) {
            const __m512 products = _mm512_mul_ps(scales_of(scales[r] + start, present), _mm512_set1_ps(a[r]));
            _mm512_storeu_ps(factors + r * stride, products);
            most = _mm512_max_ps(most, _mm512_abs_ps(products));
        }
        _mm512_storeu_ps(largest, most);
    }
    // Rounds 4 rows of 16 factors, `stride` apart: times `inverse` to whole numbers, whose low and high bytes go side by
    // side to `low` and `high`, and whose sums times -128 are added to `constants`.
    static void round_factors(const float* factors, int64_t stride, const float* inverse, uint32_t* low, uint32_t* high,
                              int32_t* constants) {
        const __m512 by = _mm512_loadu_ps(inverse);
        const __m512i byte = _mm512_set1_epi32(255);
        __m512i lows = _mm512_setzero_si512(), highs = lows, sum = lows;
        for (int k = 3; k >= 0; k--) {
            const __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(factors + k * stride), by));
            const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
            sum = _mm512_add_epi32(sum, number);
            lows = _mm512_or_si512(_mm512_slli_epi32(lows, 8), _mm512_and_si512(number, byte));
            highs = _mm512_or_si512(_mm512_slli_epi32(highs, 8), _mm512_and_si512(upper, byte));
        }
        _mm512_storeu_si512(low, lows);
        _mm512_storeu_si512(high, highs);
        _mm512_storeu_si512(constants, _mm512_sub_epi32(_mm512_loadu_si512(constants), _mm512_slli_epi32(sum, 7)));
    }

    template <Kind kind, int group_size>
    struct SumBlock {
        static constexpr int columns = kind == four_bit ? 128 : 64;
        static constexpr int groups = columns > group_size ? columns / group_size : 1;

        // sums[columns] = the constant of each column's group.
        static void start(const int32_t* constants, int32_t* sums) {
            for (int k = 0; k < columns / 16; k++) _mm512_storeu_si512(sums + 16 * k, spread<groups>(constants));
        }

        // low, high: the bytes of 4 rows' factors, for rows 0..3 and, `stride` further, 4..7. `present`: bytes that are
        // there of the 64 from `byte` on.
        static void add_8_rows(const uint8_t* const* codes, int64_t byte, int64_t present, const Table& table,
                               const uint32_t* low, const uint32_t* high, int64_t stride, int32_t* sums) {
            const __mmask64 mask = present >= 64 ? ~__mmask64(0) : (__mmask64(1) << present) - 1;
            __m512i quads[2][4], lows[2], highs[2];
#pragma GCC unroll 2
            for (int quad = 0; quad < 2; quad++) {
                __m512i rows[4];
                for (int r = 0; r < 4; r++) {
                    const uint8_t* from = codes[4 * quad + r] + byte;
                    rows[r] = present >= 64 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi8(mask, from);
                }
                const __m512i a = _mm512_unpacklo_epi8(rows[0], rows[1]), b = _mm512_unpackhi_epi8(rows[0], rows[1]);
                const __m512i c = _mm512_unpacklo_epi8(rows[2], rows[3]), d = _mm512_unpackhi_epi8(rows[2], rows[3]);
                quads[quad][0] = _mm512_unpacklo_epi16(a, c);
                quads[quad][1] = _mm512_unpackhi_epi16(a, c);
                quads[quad][2] = _mm512_unpacklo_epi16(b, d);
                quads[quad][3] = _mm512_unpackhi_epi16(b, d);
                lows[quad] = spread<groups>(low + quad * stride);
                highs[quad] = spread<groups>(high + quad * stride);
            }
#pragma GCC unroll 2
            for (int half = 0; half < columns / 64; half++) {
#pragma GCC unroll 4
                for (int k = 0; k < 4; k++) {
                    __m512i weights[2];
                    for (int quad = 0; quad < 2; quad++) {
                        const __m512i part = quads[quad][k];
                        if constexpr (kind == four_bit) {
                            weights[quad] = table.look_up(half ? _mm512_srli_epi16(part, 4) : part);
                        } else {
                            weights[quad] = _mm512_xor_si512(part, _mm512_set1_epi8(-128));
                        }
                    }
                    int32_t* at = sums + 64 * half + 16 * k;
                    __m512i sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), weights[0], highs[0]);
                    sum = _mm512_slli_epi32(_mm512_dpbusd_epi32(sum, weights[1], highs[1]), 8);
                    sum = _mm512_dpbusd_epi32(sum, weights[0], lows[0]);
                    sum = _mm512_dpbusd_epi32(sum, weights[1], lows[1]);
                    _mm512_storeu_si512(at, _mm512_add_epi32(sum, _mm512_loadu_si512(at)));
                }
            }
        }

        // y[columns] += the scale of a column's group * its sum, in the order of the columns.
        static void finish(const int32_t* sums, const float* scales, float* y) {
            for (int half = 0; half < columns / 64; half++) {
                const int32_t* from = sums + 64 * half;
                const __m512i s0 = _mm512_loadu_si512(from), s1 = _mm512_loadu_si512(from + 16);
                const __m512i s2 = _mm512_loadu_si512(from + 32), s3 = _mm512_loadu_si512(from + 48);
                // Lanes of 4 columns: from [register][lane] to [lane][register].
                const __m512i a = _mm512_shuffle_i32x4(s0, s1, 0x44), b = _mm512_shuffle_i32x4(s0, s1, 0xee);
                const __m512i c = _mm512_shuffle_i32x4(s2, s3, 0x44), d = _mm512_shuffle_i32x4(s2, s3, 0xee);
                const __m512i lanes[4] = {_mm512_shuffle_i32x4(a, c, 0x88), _mm512_shuffle_i32x4(a, c, 0xdd),
                                          _mm512_shuffle_i32x4(b, d, 0x88), _mm512_shuffle_i32x4(b, d, 0xdd)};
                for (int lane = 0; lane < 4; lane++) {
                    float* to = y + columns / 4 * lane + 16 * half;
                    const __m512 scale = _mm512_set1_ps(scales[columns / 4 * lane / group_size]);
                    _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(lanes[lane]), scale, _mm512_loadu_ps(to)));
                }
            }
        }
    };
};

template <>
struct Isa::Decoder<four_bit> {
    __m512 values = _mm512_setzero_ps(), scaled = _mm512_setzero_ps();

    Decoder() = default;
    explicit Decoder(const int8_t* table)
        : values(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))))) {}
    void scale(float factor) { scaled = _mm512_mul_ps(values, _mm512_set1_ps(factor)); }
    // The permutation reads the low four bits of each lane only.
    void decode(const uint8_t* codes, Vec* out) const {
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
        out[0] = _mm512_permutexvar_ps(bytes, scaled);
        out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), scaled);
    }
};

template <>
struct Isa::Decoder<eight_bit> {
    __m512 factors = _mm512_setzero_ps();

    Decoder() = default;
    explicit Decoder(const int8_t*) {}
    void scale(float factor) { factors = _mm512_set1_ps(factor); }
    void decode(const uint8_t* codes, Vec* out) const {
        for (int k = 0; k < vecs; k++)
            out[k] = _mm512_mul_ps(load(reinterpret_cast<const int8_t*>(codes + 16 * k)), factors);
    }
};

}  // namespace
}  // namespace hf_sparse
