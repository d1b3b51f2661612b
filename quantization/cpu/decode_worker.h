// One of the threads of decode(): what it works in, how it waits for the others, its share of products and sums. Part of
// loops.h.
#pragma once

#include <sched.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "functions.h"

#include "attend.h"
#include "decode_memory.h"

namespace hf_sparse {
namespace {

// What one thread has for itself.
struct Worker {
    const Step& step;
    const Sizes& sizes;
    const Shared& shared;
    int64_t thread, team;
    float *x, *normed, *part;  // [width]
    float *q, *k, *sink_q;     // [qkv]
    float* scores;             // [queries, page_tokens]
    float* values;             // [2 * list]
    int64_t* list;             // [list]
    int64_t* inputs;           // [hidden]
    float* masked;             // [hidden]
    bool* counts;              // [heads]
    char *activations, *predictor_activations, *sums;

    Worker(Carver* carver, const Step& step_, const Sizes& sizes_, const Shared& shared_)
        : step(step_), sizes(sizes_), shared(shared_), thread(0), team(1) {
        x = carver->take<float>(sizes.width);
        normed = carver->take<float>(sizes.width);
        part = carver->take<float>(sizes.width);
        q = carver->take<float>(3 * sizes.qkv);
        k = q + sizes.qkv;
        sink_q = k + sizes.qkv;
        scores = carver->take<float>(sizes.queries * page_tokens);
        values = carver->take<float>(2 * sizes.list);
        list = carver->take<int64_t>(sizes.list);
        inputs = carver->take<int64_t>(sizes.hidden);
        masked = carver->take<float>(sizes.hidden);
        counts = carver->take<bool>(sizes.heads);
        activations = carver->take<char>(sizes.activations);
        predictor_activations = carver->take<char>(sizes.predictor_activations);
        sums = carver->take<char>(sizes.sums);
    }

    int64_t first_of(int64_t count) const { return count * thread / team; }
    int64_t last_of(int64_t count) const { return count * (thread + 1) / team; }

    // Spins for some 50 us, then sleeps: whom it waits for may need the core.
    void wait_for_all() const {
        if (team == 1) return;
        const int phase = __atomic_load_n(shared.phase, __ATOMIC_RELAXED);
        if (__atomic_add_fetch(shared.arrived, 1, __ATOMIC_ACQ_REL) == team) {
            __atomic_store_n(shared.arrived, 0, __ATOMIC_RELAXED);
            __atomic_store_n(shared.phase, phase + 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
            if (__atomic_load_n(shared.sleeping, __ATOMIC_SEQ_CST))
                syscall(SYS_futex, shared.phase, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
#endif
            return;
        }
        for (int turns = 0; turns < 1500; turns++) {
            if (__atomic_load_n(shared.phase, __ATOMIC_ACQUIRE) != phase) return;
            Isa::pause();
        }
        __atomic_add_fetch(shared.sleeping, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(shared.phase, __ATOMIC_SEQ_CST) == phase) {
#ifdef __linux__
            syscall(SYS_futex, shared.phase, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
#else
            sched_yield();
#endif
        }
        __atomic_sub_fetch(shared.sleeping, 1, __ATOMIC_SEQ_CST);
    }

    Activations prepared(const Matrix& matrix, const float* from, Compute compute, char* memory) const {
        Activations rows;
        ActivationMemory::place(&rows, memory, 1, matrix.cols, matrix.group_size, compute_of(matrix, compute));
        prepare_row(matrix, from, 0, compute, rows);
        return rows;
    }

    // Rows [first, last) of a linear layer -> out[first .. last).
    static void linear(const Linear& linear, int64_t first, int64_t last, const Activations& from, float* out) {
        product_rows(linear.matrix, {nullptr, linear.matrix.rows}, first, last, from, out);
        if (!linear.bias) return;
        for (int64_t i = first; i < last; i++) out[i] += linear.bias[i];
    }
    // Rows list[0 .. count) -> out[0 .. count).
    static void linear(const Linear& linear, const int64_t* list, int64_t count, const Activations& from, float* out) {
        product_rows(linear.matrix, {list, count}, 0, count, from, out);
        if (!linear.bias) return;
        for (int64_t i = 0; i < count; i++) out[i] += linear.bias[list[i]];
    }

    static float magnitude(float value) { return value < 0 ? -value : value; }

    // Of the entries [first, last) of x those that are not below their thresholds; all where there are none -> to.
    // Returns how many.
    static int64_t keep(const float* below, const float* x, int64_t first, int64_t last, int64_t* to) {
        if (below) return Isa::keep(below, x, first, last, to);
        for (int64_t i = first; i < last; i++) to[i - first] = i;
        return last - first;
    }

    void count_inputs(int64_t* counted, int64_t count, int64_t of) const {
        if (!counted || thread) return;
        counted[0] += count;
        counted[1] += of;
    }

    // `from` with zeros for the entries that are below their thresholds.
    const float* without_inputs(const float* below, const float* from, int64_t cols, int64_t* counted) const {
        const int64_t count = keep(below, from, 0, cols, inputs);
        count_inputs(counted, count, cols);
        std::memset(masked, 0, static_cast<size_t>(cols) * sizeof(float));
        for (int64_t i = 0; i < count; i++) masked[inputs[i]] = from[inputs[i]];
        return masked;
    }

    // This thread's part of a product with weights by input: of the inputs that are not below their thresholds, its share,
    // times all rows. Counts entries where thresholds are.
    void add_inputs(const Matrix& matrix, const float* below, const float* from, Compute compute,
                    int64_t* counted) const {
        const int64_t count = keep(below, from, 0, matrix.cols, inputs);
        if (below) count_inputs(counted, count, matrix.cols);
        if (compute == bf16) {
            std::memcpy(masked, from, static_cast<size_t>(matrix.cols) * sizeof(float));
            round_factors_to(compute, masked, 0, matrix.cols);
            from = masked;
        }
        const int64_t first = first_of(count);
        product_inputs(matrix, {inputs + first, last_of(count) - first}, 0, padded_rows(matrix), from, compute,
                       shared.products + thread * sizes.product);
    }
    // Rows [first, last) of the product, once all threads have theirs -> out[first .. last).
    void merge_inputs(const Linear& layer, int64_t first, int64_t last, float* out) const {
        for (int64_t i = first; i < last; i++) {
            float sum = shared.products[i];
            for (int64_t t = 1; t < team; t++) sum += shared.products[t * sizes.product + i];
            out[i] = layer.bias ? sum + layer.bias[i] : sum;
        }
    }

    float* own_y(int block) const {
        float* y = shared.y[block] + thread * sizes.width;
        std::memset(y, 0, static_cast<size_t>(sizes.width) * sizeof(float));
        return y;
    }
    // What a sum of rows multiplies by, as gathered_accumulate takes it.
    static void round_factors_to(Compute compute, float* factors, int64_t first, int64_t last) {
        if (compute != bf16) return;
        for (int64_t i = first; i < last; i++) factors[i] = round_to_bf16(factors[i]);
    }
    // What all threads have added to a block's output.
    void merge(int block, const float* bias, float* out) const {
        const float* y = shared.y[block];
        for (int64_t c = 0; c < step.hidden; c++) {
            float sum = y[c];
            for (int64_t t = 1; t < team; t++) sum += y[t * sizes.width + c];
            out[c] = bias ? sum + bias[c] : sum;
        }
    }
};

}  // namespace
}  // namespace hf_sparse
