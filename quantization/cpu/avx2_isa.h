// AVX2 with FMA: 8 floats a register.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace hf_sparse {
namespace {

struct Isa {
    using Vec = __m256;
    static constexpr int width = 8, vecs = 4;

    static Vec zero() { return _mm256_setzero_ps(); }
    static Vec set1(float value) { return _mm256_set1_ps(value); }
    static Vec load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Vec value) { _mm256_storeu_ps(to, value); }
    static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
    static float sum(Vec value) {
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }

    // The values of 4-bit codes, in both halves of a register.
    struct Table {
        __m256i values = _mm256_setzero_si256();
        explicit Table(const int8_t* table) {
            if (table) values = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
        }
    };

    // The signed bytes of 32 columns, in order.
    template <bool four_bit>
    static __m256i bytes_of(const uint8_t* codes, const Table& table) {
        if constexpr (!four_bit) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        const __m256i nibbles = _mm256_srlv_epi64(_mm256_broadcastsi128_si256(packed), _mm256_set_epi64x(4, 4, 0, 0));
        return _mm256_shuffle_epi8(table.values, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
    }

    template <bool four_bit>
    struct Decoder {
        Table table{nullptr};
        __m256 factors = _mm256_setzero_ps();

        Decoder() = default;
        explicit Decoder(const int8_t* values) : table(values) {}
        void scale(float factor) { factors = _mm256_set1_ps(factor); }
        void decode(const uint8_t* codes, Vec* out) const {
            const __m256i bytes = bytes_of<four_bit>(codes, table);
            const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
            const __m128i eights[] = {low, _mm_srli_si128(low, 8), high, _mm_srli_si128(high, 8)};
            for (int k = 0; k < vecs; k++) {
                out[k] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eights[k])), factors);
            }
        }
    };

    static constexpr int corrections = 0;

    template <bool four_bit, int group_size>
    struct IntegerGroup {
        __m256i weights[group_size / 32];

        void load(const uint8_t* codes, const Table& table) {
            for (int i = 0; i < group_size / 32; i++) {
                weights[i] = bytes_of<four_bit>(codes + i * (four_bit ? 16 : 32), table);
            }
        }

        static void prepare(int8_t*, int32_t*) {}

        // |weight| * (x with the weight's sign): unsigned times signed, as the instruction wants it. No value is beyond
        // 127, so that two products fit 16 bits.
        Vec dot(const int8_t* x, const int32_t*) const {
            __m256i sums = _mm256_setzero_si256();
            for (int i = 0; i < group_size / 32; i++) {
                const __m256i activations = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 32 * i));
                const __m256i pairs =
                    _mm256_maddubs_epi16(_mm256_abs_epi8(weights[i]), _mm256_sign_epi8(activations, weights[i]));
                sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
            return _mm256_cvtepi32_ps(sums);
        }
    };
};

}  // namespace
}  // namespace hf_sparse
