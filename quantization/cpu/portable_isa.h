// Plain C++, for any CPU.
#pragma once

#include "kernels.h"
#include "plain_isa.h"

namespace hf_sparse {
namespace {

struct Isa : PlainIsa {
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
    static Vec load(const uint16_t* bf16) {
        Vec value;
        for (int i = 0; i < width; i++) {
            const uint32_t bits = static_cast<uint32_t>(bf16[i]) << 16;
            __builtin_memcpy(&value.lanes[i], &bits, sizeof bits);
        }
        return value;
    }
    static Vec load(const int8_t* bytes) {
        Vec value;
        for (int i = 0; i < width; i++) value.lanes[i] = static_cast<float>(bytes[i]);
        return value;
    }
    static void store(float* to, const Vec& value) {
        for (int i = 0; i < width; i++) to[i] = value.lanes[i];
    }
    static Vec add(Vec a, const Vec& b) {
        for (int i = 0; i < width; i++) a.lanes[i] += b.lanes[i];
        return a;
    }
    static Vec mul(Vec a, const Vec& b) {
        for (int i = 0; i < width; i++) a.lanes[i] *= b.lanes[i];
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
    static void store_sums(const Vec& a, const Vec& b, const Vec& c, const Vec& d, float* out) {
        out[0] = sum(a);
        out[1] = sum(b);
        out[2] = sum(c);
        out[3] = sum(d);
    }
    static Vec mul_scales(const uint16_t* scales, const float* by, const float*, int64_t count, float* out,
                          const Vec& sums) {
        for (int64_t i = 0; i < count; i++) {
            const uint32_t bits = static_cast<uint32_t>(scales[i]) << 16;
            float scale;
            __builtin_memcpy(&scale, &bits, sizeof scale);
            out[i] = scale * by[i];
        }
        return sums;
    }
    static void pause() {}

    struct Table {
        const int8_t* values;
        explicit Table(const int8_t* table) : values(table) {}
    };

    // The signed bytes of 32 columns, in order.
    template <Kind kind>
    static void bytes_of(const uint8_t* codes, const int8_t* table, int8_t* out) {
        for (int i = 0; i < 16; i++) {
            out[i] = kind == four_bit ? table[codes[i] & 15] : static_cast<int8_t>(codes[i]);
            out[i + 16] = kind == four_bit ? table[codes[i] >> 4] : static_cast<int8_t>(codes[i + 16]);
        }
    }

    template <Kind kind>
    struct Decoder {
        const int8_t* table = nullptr;
        float factor = 0;

        Decoder() = default;
        explicit Decoder(const int8_t* values) : table(values) {}
        void scale(float scale) { factor = scale; }
        void decode(const uint8_t* codes, Vec* out) const {
            int8_t bytes[32];
            bytes_of<kind>(codes, table, bytes);
            for (int i = 0; i < 32; i++) out[i / width].lanes[i % width] = static_cast<float>(bytes[i]) * factor;
        }
    };

    static constexpr float bias = 0;
    static constexpr bool sums_rows = false;

    template <Kind kind, int group_size>
    struct IntegerBlock {
        static constexpr int columns = group_size, groups = 1, bytes = kind == four_bit ? columns / 2 : columns;
        int8_t weights[group_size];

        void load(const uint8_t* codes, int64_t, const Table& table) {
            for (int i = 0; i < group_size; i += 32)
                bytes_of<kind>(codes + (kind == four_bit ? i / 2 : i), table.values, weights + i);
        }
        static void prepare(const int16_t* numbers, int8_t* x) {
            __builtin_memcpy(x, numbers, group_size * sizeof *numbers);
        }
        // The whole sum in the first lane.
        Vec dot(const int8_t* x) const {
            int16_t numbers[group_size];
            __builtin_memcpy(numbers, x, sizeof numbers);
            int32_t total = 0;
            for (int i = 0; i < group_size; i++) total += weights[i] * numbers[i];
            Vec sums = zero();
            sums.lanes[0] = static_cast<float>(total);
            return sums;
        }
        static Vec lanes(const float* scales) { return set1(scales[0]); }
    };
};

}  // namespace
}  // namespace hf_sparse
