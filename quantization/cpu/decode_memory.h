// The memory that decode() works in. Part of loops.h.
#pragma once

#include <initializer_list>

namespace hf_sparse {
namespace {

// Sizes of the largest layer of a step.
struct Sizes {
    int64_t hidden = 0, width = 0, qkv = 0, heads = 0, attended = 0, queries = 0, neurons = 0, predictor = 0;
    int64_t activations = 0, predictor_activations = 0, sums = 0, list = 0, product = 0;

    void take(const Matrix& matrix, int64_t* activation_bytes) {
        if (!matrix.cols) return;  // there is none; one without rows has activations all the same
        const int64_t groups = groups_of(matrix.cols, matrix.group_size);
        *activation_bytes = larger(*activation_bytes, ActivationMemory::bytes_of(groups * matrix.group_size, groups));
    }
    void take(const Predictor& of_block) {
        predictor = larger(predictor, of_block.fc1.rows);
        take(of_block.fc1, &predictor_activations);
        take(of_block.fc2, &predictor_activations);
    }
    void take_sum(const Matrix& matrix) {
        if (!matrix.codes) return;
        sums = larger(sums, SumMemory::bytes_of(matrix));
        width = larger(width, sum_width(matrix));
    }
    explicit Sizes(const Step& step) : hidden(step.hidden) {
        for (int64_t i = 0; i < step.layer_count; i++) {
            const Attention& a = step.layers[i]->attention;
            const Mlp& m = step.layers[i]->mlp;
            qkv = larger(qkv, (a.heads + 2 * a.kv_heads) * a.head_dim);
            heads = larger(heads, a.heads);
            attended = larger(attended, a.heads * a.head_dim);
            if (a.kv_heads) queries = larger(queries, a.heads / a.kv_heads);
            neurons = larger(neurons, m.up.matrix.rows);
            for (const Linear* read : {&a.q, &m.gate, &m.up})
                if (read->matrix.by_input) product = larger(product, padded_rows(read->matrix));
            take(a.q.matrix, &activations);
            take(a.k.matrix, &activations);
            take(a.v.matrix, &activations);
            take(m.gate.matrix, &activations);
            take(m.up.matrix, &activations);
            take(a.predictor);
            take(m.predictor);
            take_sum(a.o.matrix);
            take_sum(m.down.matrix);
        }
        if (step.head) take(step.head->linear.matrix, &activations);
        width = larger(width, hidden);
        list = larger(larger(neurons, predictor), larger(attended, hidden));
    }
};

// Hands out parts of one piece of memory, each on a cache line of its own. Without memory it only counts.
struct Carver {
    char* at;
    int64_t used = 0;
    template <typename T>
    T* take(int64_t count) {
        T* part = reinterpret_cast<T*>(at + used);
        used += rounded_up(count * static_cast<int64_t>(sizeof(T)), 64) + 64;
        return part;
    }
};

// What the threads share.
struct Shared {
    int *arrived, *phase, *sleeping;
    float *q, *k, *v;
    float* outs;         // [threads, heads * head_dim]
    Partial* partials;   // [threads, heads]
    float* attended;     // [heads * head_dim]
    float *gates, *ups;  // [neurons]
    float* predicted;    // [predictor]
    float* products;     // [threads, product]
    int64_t* lists;      // [threads, neurons]
    int64_t* counts;     // [threads * 8]
    float* y[2];         // [threads, width]

    Shared(Carver* carver, const Sizes& sizes, int64_t threads) {
        arrived = carver->take<int>(16);
        phase = carver->take<int>(16);
        sleeping = carver->take<int>(16);
        q = carver->take<float>(3 * sizes.qkv);
        k = q + sizes.qkv;
        v = k + sizes.qkv;
        outs = carver->take<float>(threads * sizes.attended);
        partials = carver->take<Partial>(threads * sizes.heads);
        attended = carver->take<float>(sizes.attended);
        gates = carver->take<float>(2 * sizes.neurons);
        ups = gates + sizes.neurons;
        predicted = carver->take<float>(sizes.predictor);
        products = carver->take<float>(threads * sizes.product);
        lists = carver->take<int64_t>(threads * sizes.neurons);
        counts = carver->take<int64_t>(threads * 8);
        for (float*& of_block : y) of_block = carver->take<float>(threads * sizes.width);
    }
};

}  // namespace
}  // namespace hf_sparse
