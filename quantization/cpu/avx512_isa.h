// AVX-512 with VNNI: 16 floats a register, 64 products of bytes an instruction.
#pragma once

#include <immintrin.h>

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

    // 64 columns plus 128. 4-bit: the low nibbles of 32 bytes fill the lower half of a register, the high nibbles the
    // upper one; the columns come as 0..15, 32..47, 16..31, 48..63.
    template <Kind kind>
    static __m512i bytes_of(const uint8_t* codes, const Table& table) {
        if constexpr (kind == four_bit) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
            return nibbles_of(bytes, table);
        } else {
            return _mm512_xor_si512(_mm512_loadu_si512(codes), _mm512_set1_epi8(-128));
        }
    }
    static __m512i nibbles_of(__m256i bytes, const Table& table) {
        const __m512i shifts = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
        return table.look_up(_mm512_srlv_epi64(_mm512_broadcast_i64x4(bytes), shifts));
    }

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

    template <Kind kind, int group_size>
    struct IntegerGroup {
        __m512i weights[group_size / 64];

        void load(const uint8_t* codes, const Table& table) {
            for (int i = 0; i < group_size / 64; i++)
                weights[i] = bytes_of<kind>(codes + i * (kind == four_bit ? 32 : 64), table);
        }

        // 64 low bytes, 64 high bytes, and so on.
        static void prepare(const int16_t* numbers, int8_t* x) {
            for (int i = 0; i < group_size / 64; i++) {
                __m512i low, high;
                split(numbers + 64 * i, &low, &high);
                if constexpr (kind == four_bit) {
                    const __m512i order = _mm512_set_epi64(7, 6, 3, 2, 5, 4, 1, 0);
                    low = _mm512_permutexvar_epi64(order, low);
                    high = _mm512_permutexvar_epi64(order, high);
                }
                _mm512_storeu_si512(x + 128 * i, low);
                _mm512_storeu_si512(x + 128 * i + 64, high);
            }
        }

        Vec dot(const int8_t* x) const {
            __m512i sums = _mm512_setzero_si512();
            for (int i = 0; i < group_size / 64; i++)
                sums = _mm512_dpbusd_epi32(sums, weights[i], _mm512_loadu_si512(x + 128 * i + 64));
            sums = _mm512_slli_epi32(sums, 8);
            for (int i = 0; i < group_size / 64; i++)
                sums = _mm512_dpbusd_epi32(sums, weights[i], _mm512_loadu_si512(x + 128 * i));
            return _mm512_cvtepi32_ps(sums);
        }
    };

    // Sums of rows in integers: 8 rows of 64 columns at a time, each row times a factor of 16 bits. The product
    // instruction wants 4 rows side by side, so their bytes are interleaved; what is accumulated stays in that order.
    static constexpr bool sums_rows = true;

    // Largest magnitudes among up to 16 groups of each row's a * scale, which go to `factors` [rows, stride].
    static void scale_factors(const uint16_t* scales, float a, int64_t count, float* factors, float* largest) {
        const __m512 products = _mm512_mul_ps(scales_of(scales, first(count)), _mm512_set1_ps(a));
        _mm512_storeu_ps(factors, products);
        _mm512_storeu_ps(largest, _mm512_max_ps(_mm512_loadu_ps(largest), _mm512_abs_ps(products)));
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

    // Where the second 32 columns are.
    template <Kind kind>
    static constexpr __mmask16 second = kind == four_bit ? 0xf0f0 : 0xff00;

    // sums[64] = the number for its half of the columns.
    template <Kind kind>
    static void set_sums(int32_t first_half, int32_t second_half, int32_t* sums) {
        const __m512i all = _mm512_mask_set1_epi32(_mm512_set1_epi32(first_half), second<kind>, second_half);
        for (int k = 0; k < 4; k++) _mm512_storeu_si512(sums + 16 * k, all);
    }

    // low, high: the bytes of 4 rows' factors, for rows 0..3 and 4..7, `stride` apart. With `halves` (groups of 32) each
    // half of the columns has factors of its own, side by side. `narrow`: the second half is not there.
    template <Kind kind, bool halves>
    static void add_8_rows(const uint8_t* const* codes, bool narrow, const Table& table, const uint32_t* low,
                           const uint32_t* high, int64_t stride, int32_t* sums) {
        __m512i lows[4], highs[4];
        for (int k = 0; k < 4; k++) {
            lows[k] = _mm512_loadu_si512(sums + 16 * k);
            highs[k] = _mm512_setzero_si512();
        }
#pragma GCC unroll 2
        for (int quad = 0; quad < 2; quad++) {
            __m512i rows[4];
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                const uint8_t* from = codes[4 * quad + r];
                if (!narrow) {
                    rows[r] = bytes_of<kind>(from, table);
                } else if constexpr (kind == four_bit) {
                    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
                    rows[r] = nibbles_of(_mm256_castsi128_si256(bytes), table);
                } else {
                    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                    rows[r] = _mm512_xor_si512(_mm512_castsi256_si512(bytes), _mm512_set1_epi8(-128));
                }
            }
            const __m512i a = _mm512_unpacklo_epi8(rows[0], rows[1]), b = _mm512_unpackhi_epi8(rows[0], rows[1]);
            const __m512i c = _mm512_unpacklo_epi8(rows[2], rows[3]), d = _mm512_unpackhi_epi8(rows[2], rows[3]);
            const __m512i quads[4] = {_mm512_unpacklo_epi16(a, c), _mm512_unpackhi_epi16(a, c),
                                      _mm512_unpacklo_epi16(b, d), _mm512_unpackhi_epi16(b, d)};
            const auto factors = [&](const uint32_t* of) {
                const __m512i all = _mm512_set1_epi32(static_cast<int>(of[0]));
                return halves && !narrow ? _mm512_mask_set1_epi32(all, second<kind>, static_cast<int>(of[1])) : all;
            };
            const __m512i l = factors(low + quad * stride), h = factors(high + quad * stride);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                lows[k] = _mm512_dpbusd_epi32(lows[k], quads[k], l);
                highs[k] = _mm512_dpbusd_epi32(highs[k], quads[k], h);
            }
        }
        for (int k = 0; k < 4; k++)
            _mm512_storeu_si512(sums + 16 * k, _mm512_add_epi32(lows[k], _mm512_slli_epi32(highs[k], 8)));
    }

    // y[64] += scale of its half * sums, in the order of the columns.
    template <Kind kind>
    static void add_sums(const int32_t* sums, const float* scales, float* y) {
        const __m512i s0 = _mm512_loadu_si512(sums), s1 = _mm512_loadu_si512(sums + 16);
        const __m512i s2 = _mm512_loadu_si512(sums + 32), s3 = _mm512_loadu_si512(sums + 48);
        // Lanes of 4 columns: from [register][lane] to [lane][register].
        const __m512i a = _mm512_shuffle_i32x4(s0, s1, 0x44), b = _mm512_shuffle_i32x4(s0, s1, 0xee);
        const __m512i c = _mm512_shuffle_i32x4(s2, s3, 0x44), d = _mm512_shuffle_i32x4(s2, s3, 0xee);
        const __m512i lanes[4] = {_mm512_shuffle_i32x4(a, c, 0x88), _mm512_shuffle_i32x4(a, c, 0xdd),
                                  _mm512_shuffle_i32x4(b, d, 0x88), _mm512_shuffle_i32x4(b, d, 0xdd)};
        for (int k = 0; k < 4; k++) {
            const int block = kind == four_bit ? (k % 2 * 2 + k / 2) : k;  // where lane k's 16 columns are
            float* to = y + 16 * block;
            const __m512 scale = _mm512_set1_ps(scales[block / 2]);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(lanes[k]), scale, _mm512_loadu_ps(to)));
        }
    }
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

// Half a register.
template <Kind kind>
struct Isa::IntegerGroup<kind, 32> {
    __m256i weights;

    void load(const uint8_t* codes, const Table& table) {
        if constexpr (kind == four_bit) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
            const __m256i nibbles =
                _mm256_srlv_epi64(_mm256_broadcastsi128_si256(bytes), _mm256_set_epi64x(4, 4, 0, 0));
            const __m256i values = _mm512_castsi512_si256(table.values);
            weights = _mm256_shuffle_epi8(values, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
        } else {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
            weights = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
        }
    }

    static void prepare(const int16_t* numbers, int8_t* x) {
        const __m512i all = _mm512_loadu_si512(numbers);
        const __m512i upper = _mm512_srai_epi16(_mm512_add_epi16(all, _mm512_set1_epi16(128)), 8);
        const __m256i low = _mm512_cvtepi16_epi8(_mm512_sub_epi16(all, _mm512_slli_epi16(upper, 8)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + 32), _mm512_cvtepi16_epi8(upper));
    }

    Vec dot(const int8_t* x) const {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32));
        const __m256i highs = _mm256_dpbusd_epi32(_mm256_setzero_si256(), weights, high);
        const __m256i sums = _mm256_dpbusd_epi32(_mm256_slli_epi32(highs, 8), weights, low);
        return _mm512_zextps256_ps512(_mm256_cvtepi32_ps(sums));
    }
};

}  // namespace
}  // namespace hf_sparse
