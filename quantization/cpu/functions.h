// Activation functions, norms and rotations of one token. Plain loops, which the compiler turns into vector code. Part
// of loops.h.
#pragma once

namespace hf_sparse {
namespace {

// e^x within 2 units in the last place; NaN stays NaN. Range reduction by ln 2, then a polynomial (Cephes' expf).
inline float exponential(float x) {
    x = x > 88.3f ? 88.3f : x;
    x = x < -87.3f ? -87.3f : x;
    const float shifted = x * 1.44269504f + 12582912.0f;
    const float whole = shifted - 12582912.0f;
    const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * from_bits((bits_of(shifted) - 0x4b400000u + 127u) << 23);
}

inline void activate(Activation activation, float* x, int64_t count) {
    switch (activation) {
        case silu:
            for (int64_t i = 0; i < count; i++) x[i] = x[i] / (1.0f + exponential(-x[i]));
            break;
        case gelu:
            for (int64_t i = 0; i < count; i++) x[i] = 0.5f * x[i] * (1.0f + ::erff(x[i] * 0.70710678f));
            break;
        case gelu_tanh:  // (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
            for (int64_t i = 0; i < count; i++) {
                const float y = 0.79788456f * (x[i] + 0.044715f * x[i] * x[i] * x[i]);
                x[i] = x[i] / (1.0f + exponential(-2.0f * y));
            }
            break;
        case relu:
            for (int64_t i = 0; i < count; i++) x[i] = x[i] < 0 ? 0.0f : x[i];
            break;
        case relu_squared:
            for (int64_t i = 0; i < count; i++) x[i] = x[i] < 0 ? 0.0f : x[i] * x[i];
            break;
    }
}

inline float capped(float value, float cap) {  // cap * tanh(value / cap)
    return cap * (2.0f / (1.0f + exponential(-2.0f * value / cap)) - 1.0f);
}

// Root mean square norm (Zhang and Sennrich 2019).
inline void rms_norm(const float* x, const float* weight, float epsilon, int64_t count, float* out) {
    float squares[16] = {};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        for (int k = 0; k < 16; k++) squares[k] += x[i + k] * x[i + k];
    }
    float sum = 0;
    for (; i < count; i++) sum += x[i] * x[i];
    for (int k = 0; k < 16; k++) sum += squares[k];
    const float factor = 1.0f / ::sqrtf(sum / static_cast<float>(count) + epsilon);
    for (i = 0; i < count; i++) out[i] = x[i] * factor * weight[i];
}

// Rotary positions (Su et al. 2021), the halves of a head as pairs, as transformers' rotate_half has them.
inline void rotate(float* head, const float* cos, const float* sin, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

}  // namespace
}  // namespace hf_sparse
