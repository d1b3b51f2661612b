// What the kernels of one instruction set offer. Addresses are checked by the caller; sizes are in elements unless said
// otherwise.
//
// Everything here is plain data: a function defined in this header could be compiled with one unit's instruction set
// and be linked into all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hf_sparse {

// Weights as quantization/codebooks.py describes the layout. Three kinds: 4-bit codes (a table), 8-bit codes (no table),
// bfloat16 numbers (no scales either).
struct Matrix {
    const uint8_t* codes;     // [rows, padded columns / 2]; int8 [rows, padded columns]; bfloat16 [rows, columns]
    const uint16_t* scales;   // bfloat16 [rows, groups]; null: `codes` are numbers
    const uint16_t* offsets;  // bfloat16 [rows, groups], added to every weight of the group; null: none
    const int8_t* table;      // [16], the values of 4-bit codes; null: a code is its value
    int64_t rows;
    int64_t cols;
    int64_t group_size;  // 32, 64 or 128
    bool by_input;  // `codes` [columns, padded rows / 2] or [columns, padded rows]; `scales`, `offsets` [groups, padded rows]
};

enum Kind { four_bit, eight_bit, numbers };

// Rows of a matrix: index[0..count), or 0..count-1 where index is null.
struct Selection {
    const int64_t* index;
    int64_t count;
};

// How a group's scale and codes are chosen.
struct Rule {
    const float* thresholds;  // [15], ascending; null: round to a signed byte
    float divisor;
    bool signed_peak;
    bool offset;  // codes count up from the group's smallest weight, which goes to `offsets`
};

// What activations are rounded to before a row product; see quantization/ops.py.
enum Compute : int { fp32, bf16, int8 };

// What follows describes decoder layers for the decoding of one token, see decode.h. A null `codes` or `weight`: the
// part is absent.

struct Linear {
    Matrix matrix;
    const float* bias;
};

enum Activation : int { silu, gelu, gelu_tanh, relu, relu_squared };

struct Predictor {
    Matrix fc1, fc2;
    const float* bias;
};

struct Mlp {
    Linear gate, up, down;  // `down` by neuron: [neurons, hidden]
    Predictor predictor;
    Activation activation;
    Compute compute;
    bool rule;  // leave out neurons by their activated gate, and by the predictor where there is one
    // Of magnitudes below which an entry is left out; null: gates that are zero, and none of the others.
    const float* inputs_below;  // [columns of gate]: the gate does not see them
    const float* gates_below;   // [neurons]: rows of up and down
    const float* hidden_below;  // [neurons]: rows of down
};

struct Attention {
    Linear q, k, v, o;     // `o` by neuron: [heads * head_dim, hidden]
    const float* q_norm;   // RMSNorm of every head [head_dim], or of all heads together [heads * head_dim]
    const float* k_norm;
    bool norms_all_heads;
    float norm_epsilon;
    int64_t heads, kv_heads, head_dim, rotary_dim;
    int rotation;  // which of the call's tables of cosines and sines; -1: no rotation
    float scaling;
    float softcap;   // 0: none
    int64_t window;  // tokens that a token sees, itself included; 0: all
    Compute compute;
    const float* inputs_below;    // as in Mlp, [columns of q]: q does not see them
    const float* attended_below;  // [heads * head_dim]: rows of o
    Predictor predictor;  // of the query heads that count, where rules apply: q, scores and o leave out the others
};

struct Layer {
    const float* norms[4];  // RMSNorm weights: before attention, after it, before the MLP, after it
    float epsilon;
    Attention attention;
    Mlp mlp;
};

struct Head {
    const float* norm;
    float epsilon;
    Linear linear;
    float softcap;
    bool rounds;  // logits to bfloat16
    Compute compute;
};

// Keys and values of a layer in pages of `page_tokens`, [kv_heads, page_tokens, head_dim]; see modeling/paged_cache.py.
struct CacheTable {
    const int64_t* pages;  // [pages, 4]: addresses of keys, values and, for int8, of their scales [kv_heads, page_tokens]
    int code;              // 0 float, 1 bfloat16, 2 int8
};

constexpr int64_t page_tokens = 256;

// Where the tokens of a cache lie that forgets (modeling/streaming.py): the first `keep` in their order, the oldest of
// the others `first` places behind them, the rest behind that one in a ring. No `size`: all in their order.
struct Ring {
    int64_t keep, size, first;
};

// One token through layers, or through parts of one.
struct Step {
    const Layer* const* layers;
    int64_t layer_count;
    const Head* head;         // null: none
    bool whole_layers;        // false: the one layer's attention or MLP alone, without norms and residuals
    const float* input;       // [hidden]
    float* output;            // [hidden]; null where there is a head
    float* logits;            // [rows of the head]
    int64_t hidden;
    int64_t held;             // tokens in the cache before this one
    Ring ring;
    const float* cos[2];      // [rotary_dim / 2 or more] of this token's position
    const float* sin[2];
    const float* sink_cos[2];  // of its slot, for sinks whose keys lie at slots, not at positions; null: they are at both
    const float* sink_sin[2];
    const CacheTable* caches;  // one per layer
    bool rules;
    // [layers, 6, 2]: where rules apply, entries kept and offered are added: of the MLP's input, gates and hidden, of the
    // attention's input, what it attended to, and its query heads; null: not asked for
    int64_t* computed;
    int threads;
};

struct Kernels {
    // weight [rows, cols] -> codes, scales and, where the rule has them, offsets. False where a weight is NaN, infinite
    // or beyond +-2^127.
    bool (*quantize)(const float* weight, int64_t rows, int64_t cols, int64_t group_size, const Rule& rule,
                     uint8_t* codes, uint16_t* scales, uint16_t* offsets, int threads);
    // -> out [selection.count, cols], float or bfloat16.
    void (*dequantize)(const Matrix& matrix, const Selection& selection, void* out, bool bf16, int threads);
    // Codes of a matrix -> those of the transposed one; `packed`: two to a byte.
    void (*turn)(const uint8_t* codes, bool packed, int64_t rows, int64_t cols, int64_t row_bytes, uint8_t* out,
                 int64_t out_bytes, int threads);
    // x [n, cols] -> out [n, selection.count].
    void (*row_product)(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, Compute compute,
                        float* out, int threads);
    // a [n, selection.count] -> out [n, cols].
    void (*accumulate)(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, Compute compute,
                       float* out, int threads);
    // Products with weights by input: x [cols], of which `inputs` are listed -> out [rows, rounded up to 128].
    void (*input_product)(const Matrix& matrix, const Selection& inputs, const float* x, Compute compute, float* out,
                          int threads);
    // Neurons whose score fc2 . relu(fc1 . x) + bias is above zero (or NaN) -> index, ascending. Returns how many.
    int64_t (*active_neurons)(const Predictor& predictor, const float* x, Compute compute, int64_t* index, int threads);
    // Bytes that decode() works in, and the step itself.
    int64_t (*decode_bytes)(const Step& step);
    void (*decode)(const Step& step, char* memory);
    // As row_product and accumulate, for many rows of activations, in bfloat16; null: there is nothing better.
    void (*many_row_product)(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, float* out,
                             int threads);
    void (*many_accumulate)(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, float* out,
                            int threads);
};

extern const Kernels portable_kernels;
extern const Kernels avx2_kernels;
extern const Kernels avx_vnni_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_vbmi_kernels;

// The products of many rows of activations, on CPUs with AMX: x and a, and every weight, are rounded to bfloat16 and
// products summed in float32. Offsets go with scales only. Only where amx_available().
void amx_row_product(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, float* out,
                     int threads);
void amx_accumulate(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, float* out,
                    int threads);
bool amx_available();  // asks the system for the use of AMX the first time

// 64-byte aligned memory. Throws std::bad_alloc.
void* allocate(size_t bytes);
void release(void* memory);

}  // namespace hf_sparse
