// One query's attention over pages of keys and values. Part of loops.h.
#pragma once

namespace hf_sparse {
namespace {

// Softmax over the tokens seen so far, for one query head: sums are relative to e^peak.
struct Partial {
    float peak, sum;
};

// Element `d` and on of a row of the cache.
template <typename T>
inline float cache_value(const T* row, int64_t d);
template <>
inline float cache_value(const float* row, int64_t d) { return row[d]; }
template <>
inline float cache_value(const uint16_t* row, int64_t d) { return from_bf16(row[d]); }
template <>
inline float cache_value(const int8_t* row, int64_t d) { return static_cast<float>(row[d]); }

// scores[q][t] = scaling * <query q, key t>, for `count` tokens and `queries` heads.
template <typename T>
void score_page(const float* query, int64_t queries, int64_t head_dim, const T* keys, const float* key_scales,
                int64_t count, float scaling, float* scores) {
    const int64_t whole = head_dim / Isa::width * Isa::width;
    const auto some_tokens = [&](int64_t t, auto how_many) {
        constexpr int tokens = decltype(how_many)::value;
        for (int64_t q = 0; q < queries; q++) {
            const float* of_head = query + q * head_dim;
            Vec sums[tokens];
            for (int i = 0; i < tokens; i++) sums[i] = Isa::zero();
            for (int64_t d = 0; d < whole; d += Isa::width) {
                const Vec part = Isa::load(of_head + d);
                for (int i = 0; i < tokens; i++)
                    sums[i] = Isa::fma(part, Isa::load(keys + (t + i) * head_dim + d), sums[i]);
            }
            float* to = scores + q * page_tokens + t;
            if constexpr (tokens == 4) {
                Isa::store_sums(sums[0], sums[1], sums[2], sums[3], to);
            } else {
                to[0] = Isa::sum(sums[0]);
            }
            for (int i = 0; i < tokens; i++) {
                for (int64_t d = whole; d < head_dim; d++) to[i] += cache_value(keys + (t + i) * head_dim, d) * of_head[d];
                to[i] *= key_scales ? scaling * key_scales[t + i] : scaling;
            }
        }
    };
    int64_t t = 0;
    for (; t + 4 <= count; t += 4) some_tokens(t, Size<4>());
    for (; t < count; t++) some_tokens(t, Size<1>());
}

// out[q] += sum over t of weights[q][t] * value t.
template <typename T>
void add_values(const float* weights, int64_t queries, int64_t head_dim, const T* values, const float* value_scales,
                int64_t count, float* out) {
    for (int64_t q = 0; q < queries; q++) {
        const float* factors = weights + q * page_tokens;
        float* to = out + q * head_dim;
        const auto columns = [&](int64_t d, auto how_many) {
            constexpr int parts = decltype(how_many)::value;
            Vec sums[parts];
            for (int k = 0; k < parts; k++) sums[k] = Isa::load(to + d + k * Isa::width);
            for (int64_t t = 0; t < count; t++) {
                const Vec factor = Isa::set1(value_scales ? factors[t] * value_scales[t] : factors[t]);
                for (int k = 0; k < parts; k++)
                    sums[k] = Isa::fma(factor, Isa::load(values + t * head_dim + d + k * Isa::width), sums[k]);
            }
            for (int k = 0; k < parts; k++) Isa::store(to + d + k * Isa::width, sums[k]);
        };
        int64_t d = 0;
        for (; d + 4 * Isa::width <= head_dim; d += 4 * Isa::width) columns(d, Size<4>());
        for (; d + Isa::width <= head_dim; d += Isa::width) columns(d, Size<1>());
        for (; d < head_dim; d++) {
            for (int64_t t = 0; t < count; t++)
                to[d] += factors[t] * (value_scales ? value_scales[t] : 1.0f) * cache_value(values + t * head_dim, d);
        }
    }
}

// Tokens [first, last) of one page, for the query heads of one KV head; continues what `partials` and `out` hold.
// scores: [queries, page_tokens].
template <typename T>
void attend_page(const Attention& attention, const int64_t* page, int64_t kv_head, int64_t first, int64_t last,
                 const float* query, int64_t queries, float* scores, Partial* partials, float* out) {
    const int64_t head_dim = attention.head_dim, row = kv_head * page_tokens + first, count = last - first;
    const T* keys = reinterpret_cast<const T*>(page[0]) + row * head_dim;
    const T* values = reinterpret_cast<const T*>(page[1]) + row * head_dim;
    const float* key_scales = page[2] ? reinterpret_cast<const float*>(page[2]) + row : nullptr;
    const float* value_scales = page[3] ? reinterpret_cast<const float*>(page[3]) + row : nullptr;
    score_page(query, queries, head_dim, keys, key_scales, count, attention.scaling, scores);
    for (int64_t q = 0; q < queries; q++) {
        float* of_head = scores + q * page_tokens;
        if (attention.softcap > 0) {
            for (int64_t t = 0; t < count; t++) of_head[t] = capped(of_head[t], attention.softcap);
        }
        float peak = partials[q].peak;
        for (int64_t t = 0; t < count; t++) peak = of_head[t] > peak ? of_head[t] : peak;
        const float shrink = exponential(partials[q].peak - peak);
        for (int64_t d = 0; d < head_dim; d++) out[q * head_dim + d] *= shrink;
        float sum = partials[q].sum * shrink;
        for (int64_t t = 0; t < count; t++) of_head[t] = exponential(of_head[t] - peak);
        for (int64_t t = 0; t < count; t++) sum += of_head[t];
        partials[q] = {peak, sum};
    }
    add_values(scores, queries, head_dim, values, value_scales, count, out);
}

// Writes one head's key or value, [head_dim] floats, to place `at` of a page.
inline void write_cache(int code, int64_t page, int64_t scales, int64_t at, const float* from, int64_t head_dim) {
    if (code == 0) {
        std::memcpy(reinterpret_cast<float*>(page) + at * head_dim, from, static_cast<size_t>(head_dim) * sizeof(float));
    } else if (code == 1) {
        uint16_t* to = reinterpret_cast<uint16_t*>(page) + at * head_dim;
        for (int64_t d = 0; d < head_dim; d++) {
            const bool nan = (bits_of(from[d]) & 0x7fffffff) > 0x7f800000;
            to[d] = nan ? 0x7fc0 : to_bf16(from[d]);
        }
    } else {
        const uint32_t largest = largest_magnitude_bits(from, head_dim);
        const float scale = largest < 0x7f800000 ? from_bits(largest) / 127.0f : NAN;
        int8_t* to = reinterpret_cast<int8_t*>(page) + at * head_dim;
        for (int64_t d = 0; d < head_dim; d++)
            to[d] = static_cast<int8_t>(to_whole(scale > 0 ? from[d] / scale : 0.0f, 127.0f));
        reinterpret_cast<float*>(scales)[at] = scale;
    }
}

}  // namespace
}  // namespace hf_sparse
