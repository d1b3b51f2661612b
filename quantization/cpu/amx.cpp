// Products of many rows of activations, in the tile registers of AMX: activations and weights are rounded to bfloat16,
// products summed in float32.
//
// The weights are unpacked a block at a time into the nearer caches and multiplied with every row of activations, which
// all threads have packed into tiles before. The sum is cut into slices, so that the activations of one slice and the
// sums of some blocks of weights stay in the second-level cache together. An output is summed in the order of its terms
// whatever is cut where: it depends on its own row of activations only.
#include "amx_weights.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace hf_sparse {
namespace {

constexpr int64_t slice_tiles = 16;       // tiles along the sum in a slice
constexpr int64_t whole_tiles = 32;       // a sum of as many tiles is not cut
constexpr int64_t together_blocks = 8;    // blocks of weights whose sums are held
constexpr int64_t together_pairs = 16;    // pairs of panels of 16 rows of activations that go with them
constexpr int64_t rows_at_once = 1024;    // rows of activations packed at a time
constexpr int64_t products_per_thread = 1 << 22;  // less is not worth another thread

template <typename T>
struct Buffer {
    T* data;
    explicit Buffer(int64_t count) : data(static_cast<T*>(allocate(static_cast<size_t>(count) * sizeof(T)))) {}
    ~Buffer() { release(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
};

using Decode = void (*)(const Matrix&, const Selection&, int64_t first, int64_t tiles, int64_t start, int64_t depth,
                        uint8_t* to);

// Weights are the A operand of the row product and lie by rows, B of the accumulation.
struct RowProduct {
    static constexpr bool weights_first = true;
    static constexpr int64_t strips = 1;  // pairs of tiles in a block of weights

    template <Kind kind, bool with_offsets>
    static constexpr Decode decode = decode_as_a<kind, with_offsets>;
    static int64_t terms(const Matrix& matrix, const Selection&) { return matrix.cols; }
    static int64_t outputs(const Matrix&, const Selection& selection) { return selection.count; }
};

struct Accumulation {
    static constexpr bool weights_first = false;
    static constexpr int64_t strips = 2;

    template <Kind kind, bool with_offsets>
    static constexpr Decode decode = decode_as_b<kind, with_offsets>;
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
    static constexpr int64_t block_outputs = strips * 2 * tile_side;
    static constexpr int64_t pair_floats = 4 * tile_floats;  // sums of a pair of tiles of weights with one of activations

    const Matrix& matrix;
    const Selection& selection;
    const float* x;
    int64_t n;
    float* out;
    int threads;

    const Decode decode = decoder<Operator>(matrix);
    const int64_t terms = Operator::terms(matrix, selection), outputs = Operator::outputs(matrix, selection);
    const int64_t depth = quotient_up(terms, tile_depth);
    const int64_t slices = depth <= whole_tiles ? 1 : quotient_up(depth, slice_tiles);
    const int64_t slice = quotient_up(depth, slices);
    const int64_t panels = quotient_up(n, tile_side), pairs = quotient_up(panels, 2);
    const int64_t blocks = quotient_up(outputs, block_outputs);

    // Threads share out blocks of weights; where these are few, rows of activations too.
    const int64_t block_parts = smaller(threads, blocks);
    const int64_t pair_parts = smaller(larger(threads / block_parts, 1), pairs);

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

    void multiply_pair(const uint8_t* weights, int64_t weight_tiles, const uint8_t* activations, int64_t x_tiles,
                       int64_t k_tiles, float* sums, bool add) const {
        constexpr bool first = Operator::weights_first;
        const int64_t a_tiles = first ? weight_tiles : x_tiles, b_tiles = first ? x_tiles : weight_tiles;
        const uint8_t* a = first ? weights : activations;
        const uint8_t* b = first ? activations : weights;
        const int64_t step = k_tiles * tile_bytes;
        if (a_tiles == 2 && b_tiles == 2) return multiply<2, 2>(a, step, b, step, k_tiles, sums, add);
        if (a_tiles == 2) return multiply<2, 1>(a, step, b, step, k_tiles, sums, add);
        if (b_tiles == 2) return multiply<1, 2>(a, step, b, step, k_tiles, sums, add);
        return multiply<1, 1>(a, step, b, step, k_tiles, sums, add);
    }

    void write_pair(const float* sums, int64_t output, int64_t weight_tiles, int64_t row, int64_t x_tiles) const {
        constexpr bool first = Operator::weights_first;
        for (int64_t w = 0; w < weight_tiles; w++) {
            for (int64_t t = 0; t < x_tiles; t++) {
                const float* tile = sums + (first ? w * x_tiles + t : t * weight_tiles + w) * tile_floats;
                const int64_t at_row = row + t * tile_side, at_output = output + w * tile_side;
                write_tile<first>(tile, smaller(n - at_row, tile_side), outputs - at_output,
                                  out + at_row * outputs + at_output, outputs);
            }
        }
    }

    // Some blocks with some pairs of panels: at most together_blocks and together_pairs.
    void run(int64_t first_block, int64_t last_block, int64_t first_pair, int64_t last_pair, const uint8_t* packed,
             uint8_t* weights, float* sums) const {
        for (int64_t s = 0; s < slices; s++) {
            const int64_t k_tiles = slice_depth(s);
            const bool last = s + 1 == slices;
            float* at = sums;
            for (int64_t block = first_block; block < last_block; block++) {
                const int64_t output = block * block_outputs;
                const int64_t tiles = smaller(quotient_up(outputs - output, tile_side), 2 * strips);
                // A B operand comes in pairs of tiles.
                decode(matrix, selection, output, (tiles + 1) / 2 * 2, slice_start(s), k_tiles, weights);
                for (int64_t strip = 0; strip < tiles; strip += 2) {
                    const int64_t weight_tiles = smaller(tiles - strip, 2);
                    for (int64_t pair = first_pair; pair < last_pair; pair++) {
                        const int64_t x_tiles = smaller(panels - 2 * pair, 2);
                        multiply_pair(weights + strip * k_tiles * tile_bytes, weight_tiles,
                                      packed + packed_at(s, 2 * pair), x_tiles, k_tiles, at, s != 0);
                        if (last) write_pair(at, output + strip * tile_side, weight_tiles, 2 * pair * tile_side, x_tiles);
                        if (slices > 1) at += pair_floats;
                    }
                }
            }
        }
    }

    void run_part(int64_t part, const uint8_t* packed, uint8_t* weights, float* sums) const {
        const int64_t b = part % block_parts, p = part / block_parts;
        const int64_t last_block = blocks * (b + 1) / block_parts, last_pair = pairs * (p + 1) / pair_parts;
        for (int64_t pair = pairs * p / pair_parts; pair < last_pair; pair += together_pairs) {
            const int64_t pair_stop = smaller(pair + together_pairs, last_pair);
            for (int64_t block = blocks * b / block_parts; block < last_block; block += together_blocks / strips) {
                const int64_t block_stop = smaller(block + together_blocks / strips, last_block);
                run(block, block_stop, pair, pair_stop, packed, weights, sums);
            }
        }
    }

    void operator()() const {
        const int64_t parts = block_parts * pair_parts;
        const int64_t weight_bytes = 2 * strips * slice * tile_bytes;
        const int64_t sum_floats = (slices > 1 ? together_blocks * together_pairs : 1) * pair_floats;
        Buffer<uint8_t> packed(panels * depth * tile_bytes);
        Buffer<uint8_t> weights(parts * weight_bytes);
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
                run_part(part, packed.data, weights.data + part * weight_bytes, sums.data + part * sum_floats);
        }
    }
};

template <typename Operator>
void product(const Matrix& matrix, const Selection& selection, const float* x, int64_t n, float* out, int threads) {
    const int64_t terms = Operator::terms(matrix, selection), outputs = Operator::outputs(matrix, selection);
    if (!outputs) return;
    if (!terms) {
        for (int64_t i = 0; i < n * outputs; i++) out[i] = 0;
        return;
    }
    for (int64_t start = 0; start < n; start += rows_at_once) {
        const int64_t rows = smaller(rows_at_once, n - start);
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
