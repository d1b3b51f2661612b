// Plain C++, for any CPU.
#pragma once

#include "kernels.h"

namespace hf_sparse {
namespace {

struct Isa {
    static constexpr int width = 8, vecs = 4;
    struct Vec {
        float lanes[width];
    };

    static Vec set1(float value) {
        Vec all;
        for (float& lane : all.lanes) lane = value;
        return all;
    }
    static Vec zero() { return set1(0.0f); }
    static Vec load(const float* from) {
        Vec value;
        for (int i = 0; i < width; i++) value.lanes[i] = from[i];
        return value;
    }
    static void store(float* to, const Vec& value) {
        for (int i = 0; i < width; i++) to[i] = value.lanes[i];
    }
    static Vec add(Vec a, const Vec& b) {
        for (int i = 0; i < width; i++) a.lanes[i] += b.lanes[i];
        return a;
    }
    static Vec fma(const Vec& a, const Vec& b, Vec c) {
        for (int i = 0; i < width; i++) c.lanes[i] += a.lanes[i] * b.lanes[i];
        return c;
    }
    static float sum(const Vec& value) {
        float total = 0;
        for (float lane : value.lanes) total += lane;
        return total;
    }

    struct Table {
        const int8_t* values;
        explicit Table(const int8_t* table) : values(table) {}
    };

    // The signed bytes of 32 columns, in order.
    template <bool four_bit>
    static void bytes_of(const uint8_t* codes, const int8_t* table, int8_t* out) {
        for (int i = 0; i < 16; i++) {
            out[i] = four_bit ? table[codes[i] & 15] : static_cast<int8_t>(codes[i]);
            out[i + 16] = four_bit ? table[codes[i] >> 4] : static_cast<int8_t>(codes[i + 16]);
        }
    }

    template <bool four_bit>
    struct Decoder {
        const int8_t* table = nullptr;
        float factor = 0;

        Decoder() = default;
        explicit Decoder(const int8_t* values) : table(values) {}
        void scale(float scale) { factor = scale; }
        void decode(const uint8_t* codes, Vec* out) const {
            int8_t bytes[32];
            bytes_of<four_bit>(codes, table, bytes);
            for (int i = 0; i < 32; i++) out[i / width].lanes[i % width] = static_cast<float>(bytes[i]) * factor;
        }
    };

    static constexpr int corrections = 0;

    template <bool four_bit, int group_size>
    struct IntegerGroup {
        int8_t weights[group_size];

        void load(const uint8_t* codes, const Table& table) {
            for (int i = 0; i < group_size; i += 32)
                bytes_of<four_bit>(codes + (four_bit ? i / 2 : i), table.values, weights + i);
        }
        static void prepare(int8_t*, int32_t*) {}
        // The whole sum in the first lane.
        Vec dot(const int8_t* x, const int32_t*) const {
            int32_t total = 0;
            for (int i = 0; i < group_size; i++) total += weights[i] * x[i];
            Vec sums = zero();
            sums.lanes[0] = static_cast<float>(total);
            return sums;
        }
    };
};

}  // namespace
}  // namespace hf_sparse
