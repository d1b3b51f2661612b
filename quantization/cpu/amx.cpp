// Products of many rows of activations, in the tile registers of AMX: activations and weights are rounded to bfloat16,
// products summed in float32.
//
// The weights are unpacked a block at a time into the nearer caches and multiplied with every row of activations, which
// all threads have packed into tiles before. The sum is cut into slices, so that the activations of one slice and the
// sums of some blocks of weights stay in the second-level cache together. An output is summed in the order of its terms
// whatever is cut where: it depends on its own row of activations only.
#include "amx_weights.h"
#include "buffer.h"

namespace hf_sparse {
namespace {

constexpr int64_t slice_tiles = 12;               // tiles along the sum in a slice
constexpr int64_t whole_tiles = 32;               // a sum of as many tiles is not cut
constexpr int64_t together_strips = 16;           // pairs of tiles of weights whose sums are held
constexpr int64_t together_pairs = 16;            // pairs of panels of 16 rows of activations that go with them
constexpr int64_t rows_at_once = 1024;            // rows of activations packed at a time
constexpr int64_t products_per_thread = 1 << 22;  // less is not worth another thread

using Decode = void (*)(const Matrix&, const Selection&, int64_t first, int64_t tiles, int64_t start, int64_t depth,
                        int64_t line, int64_t stop_line, uint8_t* to);

// Weights are the A operand of the row product and lie by rows, B of the accumulation.
struct RowProduct {
    static constexpr bool weights_first = true;
    static constexpr int64_t strips = 1;  // pairs of tiles in a block of weights

    template <Kind kind, bool with_offsets>
    static constexpr Decode decode = decode_as_a<kind, with_offsets>;
    static int64_t lines(int64_t tiles, int64_t) { return tiles * tile_side; }
    static int64_t terms(const Matrix& matrix, const Selection&) { return matrix.cols; }
    static int64_t outputs(const Matrix&, const Selection& selection) { return selection.count; }
};

struct Accumulation {
    static constexpr bool weights_first = false;
    static constexpr int64_t strips = 4;  // 4-bit codes of a row fill a cache line

    template <Kind kind, bool with_offsets>
    static constexpr Decode decode = decode_as_b<kind, with_offsets>;
    static int64_t lines(int64_t, int64_t depth) { return depth * tile_side; }
    static int64_t terms(const Matrix&, const Selection& selection) { return selection.count; }
    static int64_t outputs(const Matrix& matrix, const Selection&) { return matrix.cols; }
};

template <typename Operator>
Decode decoder(const Matrix& matrix) {
    if (!matrix.scales) return Operator::template decode<Kind::numbers, false>;
    if (matrix.table) {
        return matrix.offsets ? Operator::template decode<Kind::four_bit, true>
                              : Operator::template decode<Kind::four_bit, false>;
    }
    return matrix.offsets ? Operator::template decode<Kind::eight_bit, true>
                          : Operator::template decode<Kind::eight_bit, false>;
}

// One call for at most rows_at_once rows of activations.
template <typename Operator>
struct Product {
    static constexpr int64_t strips = Operator::strips;
    static constexpr int64_t strip_outputs = 2 * tile_side;
    static constexpr int64_t pair_floats = 4 * tile_floats;  // sums of two tiles of weights with two of activations

    const Matrix& matrix;
    const Selection& selection;
    const float* x;
    int64_t n;
    float* out;
    int threads;

    const Decode decode = decoder<Operator>(matrix);
    const int64_t terms = Operator::terms(matrix, selection), outputs = Operator::outputs(matrix, selection);
    const int64_t depth = quotient_up(terms, tile_depth);
    const int64_t slice = even_share(depth, depth <= whole_tiles ? whole_tiles : slice_tiles);
    const int64_t slices = quotient_up(depth, slice);
    const int64_t panels = quotient_up(n, tile_side), pairs = quotient_up(panels, 2);
    const int64_t all_strips = quotient_up(outputs, strip_outputs);
    const int64_t weight_bytes = 2 * strips * slice * tile_bytes;  // of an unpacked block

    // Threads share out weights; where these are few, rows of activations too.
    const int64_t strip_parts = smaller(threads, all_strips);
    const int64_t pair_parts = smaller(larger(threads / strip_parts, 1), pairs);

    int64_t slice_start(int64_t s) const { return s * slice; }
    int64_t slice_depth(int64_t s) const { return smaller(slice, depth - s * slice); }

    // Where the packed tiles of a panel's slice begin.
    int64_t packed_at(int64_t s, int64_t panel) const {
        return (slice_start(s) * panels + panel * slice_depth(s)) * tile_bytes;
    }

    void pack(uint8_t* packed, int64_t s, int64_t panel) const {
        uint8_t* to = packed + packed_at(s, panel);
        for (int64_t k = 0; k < slice_depth(s); k++, to += tile_bytes) {
            pack_tile<Operator::weights_first>(x, n, terms, panel * tile_side, (slice_start(s) + k) * tile_depth, to);
        }
    }

    int64_t x_tiles(int64_t pair) const { return smaller(panels - 2 * pair, 2); }

    void multiply_pair(const uint8_t* weights, int64_t weight_tiles, const uint8_t* activations, int64_t panel_tiles,
                       int64_t k_tiles, float* sums, bool add, const float* to) const {
        constexpr bool first = Operator::weights_first;
        const int64_t a_tiles = first ? weight_tiles : panel_tiles, b_tiles = first ? panel_tiles : weight_tiles;
        const uint8_t* a = first ? weights : activations;
        const uint8_t* b = first ? activations : weights;
        const int64_t step = k_tiles * tile_bytes;
        if (a_tiles == 2 && b_tiles == 2) return multiply<2, 2>(a, step, b, step, k_tiles, sums, add, to, outputs);
        if (a_tiles == 2) return multiply<2, 1>(a, step, b, step, k_tiles, sums, add, to, outputs);
        if (b_tiles == 2) return multiply<1, 2>(a, step, b, step, k_tiles, sums, add, to, outputs);
        return multiply<1, 1>(a, step, b, step, k_tiles, sums, add, to, outputs);
    }

    void write_pair(const float* sums, int64_t output, int64_t weight_tiles, int64_t pair) const {
        constexpr bool first = Operator::weights_first;
        const int64_t panel_tiles = x_tiles(pair);
        for (int64_t w = 0; w < weight_tiles; w++) {
            for (int64_t t = 0; t < panel_tiles; t++) {
                const float* tile = sums + (first ? w * panel_tiles + t : t * weight_tiles + w) * tile_floats;
                const int64_t at_row = (2 * pair + t) * tile_side, at_output = output + w * tile_side;
                write_tile<first>(tile, smaller(n - at_row, tile_side), outputs - at_output,
                                  out + at_row * outputs + at_output, outputs);
            }
        }
    }

    // Block and slice of a step of run().
    struct Step {
        int64_t output, tiles, s, depth;
        uint8_t* weights;
    };

    // Lines [total * part / parts, total * (part + 1) / parts) of the step's weights.
    void decode_part(const Step& step, int64_t part, int64_t parts) const {
        const int64_t total = Operator::lines(step.tiles, step.depth);
        decode(matrix, selection, step.output, step.tiles, slice_start(step.s), step.depth, total * part / parts,
               total * (part + 1) / parts, step.weights);
    }

    // Some strips with some pairs of panels: at most together_strips and together_pairs. The tile unit is slow to hand
    // its sums over. Meanwhile the previous sums are written and a part of the next block is unpacked.
    void run(int64_t first_strip, int64_t last_strip, int64_t first_pair, int64_t last_pair, const uint8_t* packed,
             uint8_t* weights, float* sums) const {
        const int64_t count = quotient_up(last_strip - first_strip, strips), steps = slices * count;
        const auto step_at = [&](int64_t i) {
            const int64_t strip = first_strip + i % count * strips, s = i / count;
            const int64_t output = strip * strip_outputs;
            const int64_t most = 2 * smaller(strips, last_strip - strip);
            const int64_t tiles = smaller(quotient_up(outputs - output, tile_side), most);
            return Step{output, tiles, s, slice_depth(s), weights + i % 2 * weight_bytes};
        };
        Step step = step_at(0), next = step;
        decode_part(step, 0, 1);
        const float* waiting = nullptr;  // sums to be written
        int64_t waiting_output = 0, waiting_tiles = 0, waiting_pair = 0;
        int64_t at = 0;
        for (int64_t i = 0; i < steps; i++, step = next) {
            const bool last = step.s + 1 == slices;
            const int64_t parts = quotient_up(step.tiles, 2) * (last_pair - first_pair);
            int64_t part = 0;
            if (i + 1 < steps) next = step_at(i + 1);
            if (i % count == 0) at = 0;
            for (int64_t strip = 0; strip < step.tiles; strip += 2) {
                const int64_t weight_tiles = smaller(step.tiles - strip, 2);
                for (int64_t pair = first_pair; pair < last_pair; pair++, part++, at++) {
                    float* c = sums + (slices > 1 ? at : at % 2) * pair_floats;
                    const int64_t output = step.output + strip * tile_side;
                    multiply_pair(step.weights + strip * step.depth * tile_bytes, weight_tiles,
                                  packed + packed_at(step.s, 2 * pair), x_tiles(pair), step.depth, c, step.s != 0,
                                  last ? out + 2 * pair * tile_side * outputs + output : nullptr);
                    if (waiting) write_pair(waiting, waiting_output, waiting_tiles, waiting_pair);
                    waiting = last ? c : nullptr;
                    waiting_output = output;
                    waiting_tiles = weight_tiles;
                    waiting_pair = pair;
                    if (i + 1 < steps) decode_part(next, part, parts);
                }
            }
        }
        write_pair(waiting, waiting_output, waiting_tiles, waiting_pair);
    }

    void run_part(int64_t part, const uint8_t* packed, uint8_t* weights, float* sums) const {
        const int64_t w = part % strip_parts, p = part / strip_parts;
        const int64_t first_strip = all_strips * w / strip_parts, last_strip = all_strips * (w + 1) / strip_parts;
        const int64_t first_pair = pairs * p / pair_parts, last_pair = pairs * (p + 1) / pair_parts;
        const int64_t strip_step = even_share(last_strip - first_strip, together_strips);
        const int64_t pair_step = even_share(last_pair - first_pair, together_pairs);
        for (int64_t pair = first_pair; pair < last_pair; pair += pair_step) {
            const int64_t pair_stop = smaller(pair + pair_step, last_pair);
            for (int64_t strip = first_strip; strip < last_strip; strip += strip_step)
                run(strip, smaller(strip + strip_step, last_strip), pair, pair_stop, packed, weights, sums);
        }
    }

    void operator()() const {
        const int64_t parts = strip_parts * pair_parts;
        const int64_t sum_floats = (slices > 1 ? together_strips * together_pairs : 2) * pair_floats;
        Buffer<uint8_t> packed(panels * depth * tile_bytes);
        Buffer<uint8_t> weights(parts * 2 * weight_bytes);
        Buffer<float> sums(parts * sum_floats);
#pragma omp parallel num_threads(static_cast<int>(parts))
        {
#pragma omp for collapse(2)
            for (int64_t s = 0; s < slices; s++) {
                for (int64_t panel = 0; panel < panels; panel++) pack(packed.data, s, panel);
            }
            const TileRegisters registers;
#pragma omp for
            for (int64_t part = 0; part < parts; part++)
                run_part(part, packed.data, weights.data + part * 2 * weight_bytes, sums.data + part * sum_floats);
        }
    }
};

template <typename Operator>
void product(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, float* out, int threads) {
    const int64_t terms = Operator::terms(matrix, selection), outputs = Operator::outputs(matrix, selection);
    if (!outputs || !n) return;
    if (!terms) {
        for (int64_t i = 0; i < n * outputs; i++) out[i] = 0;
        return;
    }
    const int64_t step = quotient_up(even_share(n, rows_at_once), 2 * tile_side) * 2 * tile_side;
    for (int64_t start = 0; start < n; start += step) {
        const int64_t rows = smaller(step, n - start);
        const int64_t useful = 1 + rows * terms * outputs / products_per_thread;
        Product<Operator>{matrix, selection, x + start * terms, rows, out + start * outputs,
                          static_cast<int>(smaller(threads, useful))}();
    }
}

}  // namespace

void amx_row_product(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, float* out,
                     int threads) {
    product<RowProduct>(matrix, selection, x, n, out, threads);
}

void amx_accumulate(const Matrix& matrix, const Selection& selection, const float* a, int64_t n, float* out,
                    int threads) {
    product<Accumulation>(matrix, selection, a, n, out, threads);
}

}  // namespace hf_sparse
