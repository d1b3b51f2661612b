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
    static void store(float* to, Vec value) { _mm512_storeu_ps(to, value); }
    static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum(Vec value) { return _mm512_reduce_add_ps(value); }

    template <bool four_bit>
    struct Decoder;

    // The product instruction takes unsigned times signed bytes: values are held plus 128.
    // Products with 128 are subtracted, lane by lane, as exact integers.
    static constexpr int corrections = 16;

    struct Table {
        __m512i values = _mm512_setzero_si512();
        explicit Table(const int8_t* table) {
            if (!table) return;
            const __m128i plain = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
            values = _mm512_broadcast_i32x4(_mm_xor_si128(plain, _mm_set1_epi8(-128)));
        }
    };

    template <bool four_bit, int group_size>
    struct IntegerGroup {
        __m512i weights[group_size / 64];

        // 4-bit: the low nibbles of 32 bytes fill the lower half of a register, the high nibbles the upper one.
        void load(const uint8_t* codes, const Table& table) {
            const __m512i shifts = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
            for (int i = 0; i < group_size / 64; i++) {
                if constexpr (four_bit) {
                    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * i));
                    const __m512i nibbles = _mm512_srlv_epi64(_mm512_broadcast_i64x4(bytes), shifts);
                    weights[i] = _mm512_shuffle_epi8(table.values, _mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
                } else {
                    weights[i] = _mm512_xor_si512(_mm512_loadu_si512(codes + 64 * i), _mm512_set1_epi8(-128));
                }
            }
        }

        static void prepare(int8_t* x, int32_t* corrections) {
            __m512i sums = _mm512_setzero_si512();
            for (int i = 0; i < group_size / 64; i++) {
                __m512i values = _mm512_loadu_si512(x + 64 * i);
                if constexpr (four_bit)
                    values = _mm512_permutexvar_epi64(_mm512_set_epi64(7, 6, 3, 2, 5, 4, 1, 0), values);
                _mm512_storeu_si512(x + 64 * i, values);
                sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(-128), values);
            }
            _mm512_storeu_si512(corrections, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
        }

        Vec dot(const int8_t* x, const int32_t* corrections) const {
            __m512i sums = _mm512_loadu_si512(corrections);
            for (int i = 0; i < group_size / 64; i++) {
                sums = _mm512_dpbusd_epi32(sums, weights[i], _mm512_loadu_si512(x + 64 * i));
            }
            return _mm512_cvtepi32_ps(sums);
        }
    };
};

template <>
struct Isa::Decoder<true> {
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
struct Isa::Decoder<false> {
    __m512 factors = _mm512_setzero_ps();

    Decoder() = default;
    explicit Decoder(const int8_t*) {}
    void scale(float factor) { factors = _mm512_set1_ps(factor); }
    void decode(const uint8_t* codes, Vec* out) const {
        for (int k = 0; k < vecs; k++) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * k));
            out[k] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), factors);
        }
    }
};

template <bool four_bit>
struct Isa::IntegerGroup<four_bit, 32> {
    __m256i weights;

    void load(const uint8_t* codes, const Table& table) {
        if constexpr (four_bit) {
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

    static void prepare(int8_t* x, int32_t* corrections) {
        const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
        const __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(-128), values);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(corrections), _mm256_sub_epi32(_mm256_setzero_si256(), sums));
    }

    Vec dot(const int8_t* x, const int32_t* corrections) const {
        const __m256i start = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(corrections));
        const __m256i activations = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
        return _mm512_zextps256_ps512(_mm256_cvtepi32_ps(_mm256_dpbusd_epi32(start, weights, activations)));
    }
};

}  // namespace
}  // namespace hf_sparse
