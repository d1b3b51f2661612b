// One token through decoder layers, in one parallel region: each thread keeps the hidden states for itself, computes its
// share of the rows of every product, and waits for the others only where it needs what they computed. Part of loops.h.
//
// Sums over threads are formed in the order of the threads, so that a result depends on their number alone.
#pragma once

#include "decode_worker.h"

namespace hf_sparse {
namespace {

constexpr int64_t part_tokens = 64;  // of a page that a thread attends to at a time

// Places [first, last) of a cache that a token attends to, in parts of part_tokens.
struct Span {
    int64_t first, last;

    int64_t first_part() const { return first / part_tokens; }
    int64_t parts() const { return last > first ? (last - 1) / part_tokens - first_part() + 1 : 0; }
};

// What a token attends to that sees the last `window` (0: all) of the tokens of a cache, itself included: sinks, and the
// ring in two pieces. Without a ring all is in the second span.
struct Spans {
    Span of[3];
    int64_t newest;  // where the token itself goes

    Spans(const Ring& ring, int64_t held, int64_t window) : of{} {
        const int64_t start = window ? larger(0, held + 1 - window) : 0, stop = held + 1;
        newest = held;
        if (!ring.size) {
            of[1] = {start, stop};
            return;
        }
        of[0] = {start, smaller(ring.keep, stop)};
        if (stop <= ring.keep) return;
        const int64_t skipped = larger(start - ring.keep, 0), count = stop - ring.keep - skipped;
        const int64_t first = (ring.first + skipped) % ring.size;
        of[1] = {ring.keep + first, ring.keep + smaller(first + count, ring.size)};
        of[2] = {ring.keep, ring.keep + larger(first + count - ring.size, 0)};
        newest = ring.keep + (first + count - 1) % ring.size;
    }
    int64_t parts() const { return of[0].parts() + of[1].parts() + of[2].parts(); }
};

struct LayerWorker : Worker {
    using Worker::Worker;

    void norm(const Attention& a, const float* weight, int64_t heads, float* states) const {
        if (!weight) return;
        if (a.norms_all_heads) return rms_norm(states, weight, a.norm_epsilon, heads * a.head_dim, states);
        for (int64_t head = 0; head < heads; head++) {
            float* of_head = states + head * a.head_dim;
            rms_norm(of_head, weight, a.norm_epsilon, a.head_dim, of_head);
        }
    }
    static void rotate_heads(const Attention& a, const float* cos, const float* sin, int64_t heads, float* states) {
        for (int64_t head = 0; head < heads; head++) rotate(states + head * a.head_dim, cos, sin, a.rotary_dim);
    }

    void attention(const Attention& a, const CacheTable& cache, const float* from, int64_t* computed) const {
        const int64_t q_rows = a.heads * a.head_dim, kv_rows = a.kv_heads * a.head_dim;
        const bool some_heads = step.rules && a.predictor.fc1.codes;
        const bool by_input = a.q.matrix.by_input;
        const int64_t computed_rows =
            by_input ? 0 : some_heads ? choose_heads(a, from, computed) * a.head_dim : q_rows;
        const int64_t all = computed_rows + 2 * kv_rows, first = first_of(all), last = last_of(all);
        const auto share = [&](const Linear& part, int64_t start, int64_t count, const Activations& rows, float* out) {
            linear(part, larger(first - start, 0), smaller(last - start, count), rows, out);
        };
        const float* below = step.rules && !some_heads ? a.inputs_below : nullptr;
        int64_t* counted = computed ? computed + 6 : nullptr;
        if (by_input) {
            add_inputs(a.q.matrix, below, from, a.compute, counted);
        } else if (below) {
            const float* seen = without_inputs(below, from, a.q.matrix.cols, counted);
            share(a.q, 0, q_rows, prepared(a.q.matrix, seen, a.compute, activations), shared.q);
        }
        const Matrix* seen_by = nullptr;
        Activations rows;
        const auto rows_for = [&](const Linear& part) {
            if (!seen_by || !see_alike(*seen_by, part.matrix)) rows = prepared(part.matrix, from, a.compute, activations);
            seen_by = &part.matrix;
            return rows;
        };
        if (some_heads) {
            const Activations for_q = rows_for(a.q);
            int64_t at = 0;
            for (int64_t head = 0; head < a.heads; head++) {
                if (!counts[head]) continue;
                const int64_t row = head * a.head_dim;  // `at`: this row among those that are computed
                linear(a.q, row + larger(first - at, 0), row + smaller(last - at, a.head_dim), for_q, shared.q);
                at += a.head_dim;
            }
        } else if (!below && !by_input) {
            share(a.q, 0, q_rows, rows_for(a.q), shared.q);
        }
        share(a.k, computed_rows, kv_rows, rows_for(a.k), shared.k);
        share(a.v, computed_rows + kv_rows, kv_rows, rows_for(a.v), shared.v);
        wait_for_all();

        if (by_input) {
            merge_inputs(a.q, 0, q_rows, q);
        } else {
            std::memcpy(q, shared.q, static_cast<size_t>(q_rows) * sizeof(float));
        }
        for (int64_t head = 0; some_heads && head < a.heads; head++)
            if (!counts[head]) std::memset(q + head * a.head_dim, 0, static_cast<size_t>(a.head_dim) * sizeof(float));
        std::memcpy(k, shared.k, static_cast<size_t>(kv_rows) * sizeof(float));
        norm(a, a.q_norm, a.heads, q);
        norm(a, a.k_norm, a.kv_heads, k);
        const Spans spans(step.ring, step.held, a.window);
        const float* of_sinks = q;  // the query that sinks see: keys turned by less than the text is long
        if (a.rotation >= 0) {
            if (step.sink_cos[a.rotation] && spans.of[0].parts()) {
                std::memcpy(sink_q, q, static_cast<size_t>(q_rows) * sizeof(float));
                rotate_heads(a, step.sink_cos[a.rotation], step.sink_sin[a.rotation], a.heads, sink_q);
                of_sinks = sink_q;
            }
            rotate_heads(a, step.cos[a.rotation], step.sin[a.rotation], a.heads, q);
            rotate_heads(a, step.cos[a.rotation], step.sin[a.rotation], a.kv_heads, k);
        }
        const int64_t parts = spans.parts(), units = a.kv_heads * parts, queries = a.heads / a.kv_heads;
        float* outs = shared.outs + thread * sizes.attended;
        Partial* partials = shared.partials + thread * sizes.heads;
        for (int64_t unit = first_of(units); unit < last_of(units); unit++) {
            const int64_t head = unit / parts, query = head * queries;
            const Span* span = spans.of;
            int64_t part = unit % parts;
            for (; part >= span->parts(); span++) part -= span->parts();
            const int64_t part_start = (span->first_part() + part) * part_tokens, page = part_start / page_tokens;
            const int64_t from_place = larger(span->first, part_start);
            const int64_t to_place = smaller(span->last, part_start + part_tokens);
            if (unit == first_of(units) || unit % parts == 0) {
                for (int64_t i = query; i < query + queries; i++) partials[i] = {-INFINITY, 0.0f};
                std::memset(outs + query * a.head_dim, 0, static_cast<size_t>(queries * a.head_dim) * sizeof(float));
            }
            const int64_t* of_page = cache.pages + 4 * page;
            if (from_place <= spans.newest && spans.newest < to_place) {
                const int64_t at = head * page_tokens + spans.newest % page_tokens;
                write_cache(cache.code, of_page[0], of_page[2], at, k + head * a.head_dim, a.head_dim);
                write_cache(cache.code, of_page[1], of_page[3], at, shared.v + head * a.head_dim, a.head_dim);
            }
            const int64_t begin = from_place - page * page_tokens, end = to_place - page * page_tokens;
            const float* asked = span == spans.of ? of_sinks : q;
            const auto attend = [&](auto which, int64_t from_head, int64_t to_head) {
                const int64_t at = from_head * a.head_dim;
                attend_page<decltype(which)>(a, of_page, head, begin, end, asked + at, to_head - from_head, scores,
                                             partials + from_head, outs + at);
            };
            for (int64_t i = query, next; i < query + queries; i = next) {
                next = some_heads ? i + 1 : query + queries;
                if (some_heads && !counts[i]) continue;
                while (next < query + queries && counts[next]) next++;
                if (cache.code == 0) attend(float(), i, next);
                if (cache.code == 1) attend(uint16_t(), i, next);
                if (cache.code == 2) attend(int8_t(), i, next);
            }
        }
        wait_for_all();

        const int64_t o_first = first_of(q_rows), o_last = last_of(q_rows);
        for (int64_t head = o_first / a.head_dim; head * a.head_dim < o_last; head++) {
            if (some_heads && !counts[head]) continue;
            merge_head(a, head, units, parts, larger(o_first, head * a.head_dim),
                       smaller(o_last, (head + 1) * a.head_dim));
        }
        if (some_heads || (step.rules && a.attended_below)) {
            int64_t count = 0;
            for (int64_t head = o_first / a.head_dim; head * a.head_dim < o_last; head++) {
                if (some_heads && !counts[head]) continue;
                count += keep(a.attended_below, shared.attended, larger(o_first, head * a.head_dim),
                              smaller(o_last, (head + 1) * a.head_dim), list + count);
            }
            for (int64_t i = 0; i < count; i++) values[i] = shared.attended[list[i]];
            round_factors_to(a.compute, values, 0, count);
            add_rows(a.o.matrix, {list, count}, 0, count, values, a.compute, sums, own_y(0));
            count_kept(computed, 8, count, q_rows);
            return;
        }
        round_factors_to(a.compute, shared.attended, o_first, o_last);
        add_rows(a.o.matrix, {nullptr, q_rows}, o_first, o_last, shared.attended, a.compute, sums, own_y(0));
    }

    // Of the query heads, those that the predictor expects to count -> `counts`. Returns how many. Every thread computes
    // all: that takes less than to wait for the others.
    int64_t choose_heads(const Attention& a, const float* from, int64_t* computed) const {
        const Linear fc1{a.predictor.fc1, nullptr}, fc2{a.predictor.fc2, a.predictor.bias};
        const int64_t width = fc1.matrix.rows, none = 0;
        float *hidden = values, *scores_of_heads = values + sizes.list;
        linear(fc1, none, width, prepared(fc1.matrix, from, a.compute, predictor_activations), hidden);
        activate(relu, hidden, width);
        const Activations rows = prepared(fc2.matrix, hidden, a.compute, predictor_activations);
        linear(fc2, none, a.heads, rows, scores_of_heads);
        int64_t count = 0;
        for (int64_t head = 0; head < a.heads; head++) {
            counts[head] = !(scores_of_heads[head] <= 0);
            count += counts[head];
        }
        count_inputs(computed ? computed + 10 : nullptr, count, a.heads);
        return count;
    }

    // Adds to `computed` at `place` what this thread kept, and once what was offered.
    void count_kept(int64_t* computed, int place, int64_t kept, int64_t offered) const {
        if (!computed) return;
        __atomic_fetch_add(computed + place, kept, __ATOMIC_RELAXED);
        if (thread == 0) computed[place + 1] += offered;
    }

    // Elements [first, last) of what a head attended to, from the threads that had tokens of it.
    void merge_head(const Attention& a, int64_t head, int64_t units, int64_t parts, int64_t first, int64_t last) const {
        const int64_t kv_head = head / (a.heads / a.kv_heads);
        const auto had = [&](int64_t t) {
            return units * t / team < (kv_head + 1) * parts && units * (t + 1) / team > kv_head * parts &&
                   units * t / team < units * (t + 1) / team;
        };
        float peak = -INFINITY, sum = 0;
        bool nan = false;
        for (int64_t t = 0; t < team; t++) {
            if (!had(t)) continue;
            const float of_thread = shared.partials[t * sizes.heads + head].peak;
            peak = of_thread > peak ? of_thread : peak;
            nan = nan || of_thread != of_thread;
        }
        for (int64_t i = first; i < last; i++) shared.attended[i] = 0;
        for (int64_t t = 0; t < team; t++) {
            if (!had(t)) continue;
            const Partial& partial = shared.partials[t * sizes.heads + head];
            const float factor = nan ? NAN : exponential(partial.peak - peak);
            sum += factor * partial.sum;
            const float* outs = shared.outs + t * sizes.attended;
            for (int64_t i = first; i < last; i++) shared.attended[i] += factor * outs[i];
        }
        for (int64_t i = first; i < last; i++) shared.attended[i] /= sum;
    }

    // The neurons that the predictor expects to be active among this thread's share of them -> the thread's list.
    void predict(const Predictor& predictor, const float* from, Compute compute) const {
        const Activations rows = prepared(predictor.fc1, from, compute, predictor_activations);
        const int64_t width = predictor.fc1.rows, neurons = predictor.fc2.rows;
        const int64_t first = first_of(width), last = last_of(width);
        product_rows(predictor.fc1, {nullptr, width}, first, last, rows, shared.predicted);
        activate(relu, shared.predicted + first, last - first);
        wait_for_all();
        const Activations hidden = prepared(predictor.fc2, shared.predicted, compute, predictor_activations);
        linear({predictor.fc2, predictor.bias}, first_of(neurons), last_of(neurons), hidden, shared.gates);
        int64_t count = 0;
        int64_t* own = shared.lists + thread * sizes.neurons;
        for (int64_t i = first_of(neurons); i < last_of(neurons); i++) {
            own[count] = i;
            count += !(shared.gates[i] <= 0);
        }
        shared.counts[8 * thread] = count;
    }

    // Takes those out of a list whose value is zero. Returns how many stay.
    static int64_t without_zeros(int64_t* places, int64_t count, const float* of_all) {
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t place = places[i];
            places[kept] = place;
            kept += of_all[place] != 0;
        }
        return kept;
    }

    // This thread's share of all the threads' lists -> `list`. Returns its length.
    int64_t take_share() const {
        int64_t all = 0;
        for (int64_t t = 0; t < team; t++) all += shared.counts[8 * t];
        const int64_t first = first_of(all), last = last_of(all);
        int64_t start = 0, taken = 0;
        for (int64_t t = 0; t < team; t++) {
            const int64_t count = shared.counts[8 * t];
            const int64_t from = larger(first - start, 0), to = smaller(last - start, count);
            for (int64_t i = from; i < to; i++) list[taken++] = shared.lists[t * sizes.neurons + i];
            start += count;
        }
        return taken;
    }

    void mlp(const Mlp& m, const float* from, int64_t* computed) const {
        const Linear& gate = m.gate.matrix.codes ? m.gate : m.up;
        const bool gated = m.gate.matrix.codes != nullptr, rule = m.rule && step.rules;
        const int64_t neurons = m.up.matrix.rows, first = first_of(neurons), last = last_of(neurons);
        const bool by_input = gate.matrix.by_input;
        const float* below = rule ? m.inputs_below : nullptr;
        float *gates = shared.gates, *ups = shared.ups;
        const auto own_gates = [&] {
            if (by_input) {
                add_inputs(gate.matrix, below, from, m.compute, computed);
                wait_for_all();
                merge_inputs(gate, first, last, gates);
            } else {
                const float* seen = below ? without_inputs(below, from, gate.matrix.cols, computed) : from;
                linear(gate, first, last, prepared(gate.matrix, seen, m.compute, activations), gates);
            }
            activate(m.activation, gates + first, last - first);
        };
        // What `up` multiplies; where the gate saw the same it is still there.
        const auto for_up = [&] {
            if (below || by_input || !see_alike(gate.matrix, m.up.matrix))
                return prepared(m.up.matrix, from, m.compute, activations);
            Activations rows;
            ActivationMemory::place(&rows, activations, 1, m.up.matrix.cols, m.up.matrix.group_size,
                                    compute_of(m.up.matrix, m.compute));
            return rows;
        };
        if (!rule) {
            own_gates();
            if (gated) {
                linear(m.up, first, last, for_up(), ups);
                for (int64_t i = first; i < last; i++) gates[i] *= ups[i];
            }
            round_factors_to(m.compute, gates, first, last);
            add_rows(m.down.matrix, {nullptr, neurons}, first, last, gates, m.compute, sums, own_y(1));
            return;
        }
        const auto active = [&](int64_t neuron, float value) {
            return m.gates_below ? !(magnitude(value) < m.gates_below[neuron]) : value != 0;
        };
        float *gate_values = values, *up_values = values + sizes.list;
        int64_t count = 0;
        if (m.predictor.fc1.codes) {
            predict(m.predictor, from, m.compute);
            wait_for_all();
            const float* seen = below ? without_inputs(below, from, gate.matrix.cols, computed) : from;
            const int64_t candidates = take_share();
            linear(gate, list, candidates, prepared(gate.matrix, seen, m.compute, activations), gate_values);
            activate(m.activation, gate_values, candidates);
            for (int64_t i = 0; i < candidates; i++) {
                list[count] = list[i];
                gate_values[count] = gate_values[i];
                count += active(list[i], gate_values[i]);
            }
        } else {
            own_gates();
            // Each thread goes on with its own: where most stay, and where sums are to be those of all neurons, bit for bit.
            if (m.gates_below || m.compute == fp32) {
                count = keep(m.gates_below, gates, first, last, list);
                if (!m.gates_below) count = without_zeros(list, count, gates);
            } else {
                int64_t* own = shared.lists + thread * sizes.neurons;
                shared.counts[8 * thread] = without_zeros(own, keep(nullptr, gates, first, last, own), gates);
                wait_for_all();
                count = take_share();
            }
            for (int64_t i = 0; i < count; i++) gate_values[i] = gates[list[i]];
        }
        count_kept(computed, 2, count, neurons);
        if (gated) {
            linear(m.up, list, count, for_up(), up_values);
            for (int64_t i = 0; i < count; i++) gate_values[i] *= up_values[i];
        }
        if (m.hidden_below) {
            int64_t kept = 0;
            for (int64_t i = 0; i < count; i++) {
                const bool stays = !(magnitude(gate_values[i]) < m.hidden_below[list[i]]);
                list[kept] = list[i];
                gate_values[kept] = gate_values[i];
                kept += stays;
            }
            count = kept;
        }
        count_kept(computed, 4, count, neurons);
        round_factors_to(m.compute, gate_values, 0, count);
        add_rows(m.down.matrix, {list, count}, 0, count, gate_values, m.compute, sums, own_y(1));
    }

    const float* norm(const float* weight, float epsilon, const float* from, float* to) const {
        if (!weight) return from;
        rms_norm(from, weight, epsilon, step.hidden, to);
        return to;
    }
    void add_block(int block, const float* bias, const float* weight, float epsilon) const {
        merge(block, bias, part);
        norm(weight, epsilon, part, part);
        for (int64_t c = 0; c < step.hidden; c++) x[c] += part[c];
    }

    void run() const {
        std::memcpy(x, step.input, static_cast<size_t>(step.hidden) * sizeof(float));
        for (int64_t i = 0; i < step.layer_count; i++) {
            const Layer& layer = *step.layers[i];
            const Attention& a = layer.attention;
            const Mlp& m = layer.mlp;
            int64_t* computed = step.computed ? step.computed + 12 * i : nullptr;
            if (a.q.matrix.codes) {
                attention(a, step.caches[i], norm(layer.norms[0], layer.epsilon, x, normed), computed);
                wait_for_all();
                if (!step.whole_layers) return output(0, a.o.bias);
                add_block(0, a.o.bias, layer.norms[1], layer.epsilon);
            }
            mlp(m, norm(layer.norms[2], layer.epsilon, x, normed), computed);
            wait_for_all();
            if (!step.whole_layers) return output(1, m.down.bias);
            add_block(1, m.down.bias, layer.norms[3], layer.epsilon);
        }
        if (!step.head) {
            if (thread == 0) std::memcpy(step.output, x, static_cast<size_t>(step.hidden) * sizeof(float));
            return;
        }
        const Head& head = *step.head;
        const Matrix& matrix = head.linear.matrix;
        const float* states = norm(head.norm, head.epsilon, x, normed);
        const Activations rows = prepared(matrix, states, head.compute, activations);
        const int64_t first = first_of(matrix.rows), last = last_of(matrix.rows);
        linear(head.linear, first, last, rows, step.logits);
        if (head.softcap > 0) {
            for (int64_t i = first; i < last; i++) step.logits[i] = capped(step.logits[i], head.softcap);
        }
        if (!head.rounds) return;
        for (int64_t i = first; i < last; i++) step.logits[i] = round_to_bf16(step.logits[i]);
    }
    void output(int block, const float* bias) const {
        if (thread == 0) merge(block, bias, step.output);
    }
};

int64_t decode_bytes(const Step& step) {
    const Sizes sizes(step);
    Carver shared_carver{nullptr}, worker_carver{nullptr};
    const Shared shared(&shared_carver, sizes, step.threads);
    const LayerWorker worker(&worker_carver, step, sizes, shared);
    return shared_carver.used + step.threads * worker_carver.used;
}

void decode(const Step& step, char* memory) {
    const Sizes sizes(step);
    Carver carver{memory};
    const Shared shared(&carver, sizes, step.threads);
    *shared.arrived = *shared.phase = *shared.sleeping = 0;
    Carver counter{nullptr};
    const LayerWorker counted(&counter, step, sizes, shared);
#pragma omp parallel num_threads(step.threads)
    {
        Carver own{memory + carver.used + thread_number() * counter.used};
        LayerWorker worker(&own, step, sizes, shared);
        worker.thread = thread_number();
        worker.team = team_size();
        worker.run();
    }
}

int64_t active_neurons(const Predictor& predictor, const float* x, Compute compute, int64_t* index, int threads) {
    Layer layer = {};
    layer.mlp.predictor = predictor;
    layer.mlp.up.matrix.rows = predictor.fc2.rows;
    const Layer* layers[] = {&layer};
    Step step = {};
    step.layers = layers;
    step.layer_count = 1;
    step.hidden = predictor.fc1.cols;
    step.threads = useful_threads(threads, predictor.fc2.rows * predictor.fc2.cols);
    Buffer<char> memory(decode_bytes(step));
    const Sizes sizes(step);
    Carver carver{memory.data};
    const Shared shared(&carver, sizes, step.threads);
    *shared.arrived = *shared.phase = *shared.sleeping = 0;
    Carver counter{nullptr};
    const LayerWorker counted(&counter, step, sizes, shared);
    int64_t team = 1;
#pragma omp parallel num_threads(step.threads)
    {
        Carver own{memory.data + carver.used + thread_number() * counter.used};
        LayerWorker worker(&own, step, sizes, shared);
        worker.thread = thread_number();
        worker.team = team_size();
        if (worker.thread == 0) team = worker.team;
        worker.predict(predictor, x, compute);
    }
    int64_t count = 0;
    for (int64_t t = 0; t < team; t++) {
        std::memcpy(index + count, shared.lists + t * sizes.neurons,
                    static_cast<size_t>(shared.counts[8 * t]) * sizeof(int64_t));
        count += shared.counts[8 * t];
    }
    return count;
}

}  // namespace
}  // namespace hf_sparse
