// AVX2 with FMA: 8 floats a register. With AVX-VNNI (__AVXVNNI__) 32 products of bytes an instruction.
#pragma once

#include <immintrin.h>

#include "kernels.h"
#include "plain_isa.h"

namespace hf_sparse {
namespace {

struct Isa : PlainIsa {
    using Vec = __m256;
    static constexpr int width = 8, vecs = 4;

    static Vec zero() { return _mm256_setzero_ps(); }
    static Vec set1(float value) { return _mm256_set1_ps(value); }
    static Vec load(const float* from) { return _mm256_loadu_ps(from); }
    static Vec load(const uint16_t* bf16) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bf16));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    static Vec load(const int8_t* bytes) {
        return _mm256_cvtepi32_ps(
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
    }
    static void store(float* to, Vec value) { _mm256_storeu_ps(to, value); }
    static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
    static Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
    static float sum(Vec value) {
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    static void store_sums(Vec a, Vec b, Vec c, Vec d, float* out) {
        const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
    }
    static Vec mul_scales(const uint16_t* scales, const float* by, const float* corrections, int64_t count, float* out,
                          Vec sums) {
        float total = 0;
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = static_cast<uint32_t>(scales[i]) << 16;
            float scale;
            __builtin_memcpy(&scale, &bits, sizeof scale);
            out[i] = scale * by[i];
            if (bias != 0) total += out[i] * corrections[i];
        }
        return _mm256_add_ps(sums, _mm256_castps128_ps256(_mm_set_ss(total)));
    }
    static void pause() { _mm_pause(); }

    // The values of 4-bit codes, in both halves of a register.
    struct Table {
        __m256i values = _mm256_setzero_si256();
        explicit Table(const int8_t* table) {
            if (table) values = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
        }
    };

    // The signed bytes of 32 columns, in order.
    template <Kind kind>
    static __m256i bytes_of(const uint8_t* codes, const Table& table) {
        if constexpr (kind == eight_bit) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        const __m256i nibbles = _mm256_srlv_epi64(_mm256_broadcastsi128_si256(packed), _mm256_set_epi64x(4, 4, 0, 0));
        return _mm256_shuffle_epi8(table.values, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
    }

    template <Kind kind>
    struct Decoder {
        Table table{nullptr};
        __m256 factors = _mm256_setzero_ps();

        Decoder() = default;
        explicit Decoder(const int8_t* values) : table(values) {}
        void scale(float factor) { factors = _mm256_set1_ps(factor); }
        void decode(const uint8_t* codes, Vec* out) const {
            const __m256i bytes = bytes_of<kind>(codes, table);
            const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
            const __m128i eights[] = {low, _mm_srli_si128(low, 8), high, _mm_srli_si128(high, 8)};
            for (int k = 0; k < vecs; k++) {
                out[k] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eights[k])), factors);
            }
        }
    };

    template <Kind kind, int group_size>
    struct IntegerBlock {
        static constexpr int columns = group_size, groups = 1, bytes = kind == four_bit ? columns / 2 : columns;
        __m256i weights[group_size / 32];

        void load(const uint8_t* codes, int64_t, const Table& table) {
            for (int i = 0; i < group_size / 32; i++)
                weights[i] = bytes_of<kind>(codes + i * (kind == four_bit ? 16 : 32), table);
        }

#ifdef __AVXVNNI__
        // Unsigned times signed bytes: weights are taken plus the bias.
        static void prepare(const int16_t* numbers, int8_t* x) {
            for (int i = 0; i < group_size / 32; i++) {
                for (int c = 0; c < 32; c++) {
                    const int number = numbers[32 * i + c], high = (number + 128) >> 8;
                    x[64 * i + c] = static_cast<int8_t>(number - high * 256);
                    x[64 * i + 32 + c] = static_cast<int8_t>(high);
                }
            }
        }

        Vec dot(const int8_t* x) const {
            __m256i sums = _mm256_setzero_si256();
            const __m256i all_128 = _mm256_set1_epi8(-128);
            for (int i = 0; i < group_size / 32; i++) {
                const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 64 * i + 32));
                sums = _mm256_dpbusd_avx_epi32(sums, _mm256_xor_si256(weights[i], all_128), high);
            }
            sums = _mm256_slli_epi32(sums, 8);
            for (int i = 0; i < group_size / 32; i++) {
                const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 64 * i));
                sums = _mm256_dpbusd_avx_epi32(sums, _mm256_xor_si256(weights[i], all_128), low);
            }
            return _mm256_cvtepi32_ps(sums);
        }
#else
        static void prepare(const int16_t* numbers, int8_t* x) {
            for (int i = 0; i < group_size / 16; i++) {
                const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers + 16 * i));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(x + 32 * i), some);
            }
        }

        Vec dot(const int8_t* x) const {
            __m256i sums = _mm256_setzero_si256();
            for (int i = 0; i < group_size / 32; i++) {
                const __m128i halves[] = {_mm256_castsi256_si128(weights[i]), _mm256_extracti128_si256(weights[i], 1)};
                for (int k = 0; k < 2; k++) {
                    const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 64 * i + 32 * k));
                    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_cvtepi8_epi16(halves[k]), numbers));
                }
            }
            return _mm256_cvtepi32_ps(sums);
        }
#endif
        static Vec lanes(const float* scales) { return set1(scales[0]); }
    };

#ifdef __AVXVNNI__
    static constexpr float bias = 128;
#else
    static constexpr float bias = 0;
#endif
    static constexpr bool sums_rows = false;
};

}  // namespace
}  // namespace hf_sparse
