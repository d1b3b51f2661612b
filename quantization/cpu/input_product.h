// Products with weights that are stored by input, of one row of activations: what an input that is left out would
// multiply is not read. Part of loops.h.
#pragma once

namespace hf_sparse {
namespace {

// Rows of a matrix by input, of which each input holds one code; multiples of this are what threads share out.
inline int64_t padded_rows(const Matrix& matrix) { return rounded_up(matrix.rows, block_columns); }

// A run of inputs that share their scales.
struct InputGroup {
    const uint16_t *scales, *offsets;  // bfloat16 [padded rows]
    const int64_t* inputs;
    int64_t count;

    InputGroup(const Matrix& matrix, const Selection& inputs_, int64_t at) : inputs(inputs_.index + at), count(0) {
        const int64_t group = inputs[0] / matrix.group_size, stop = (group + 1) * matrix.group_size;
        while (at + count < inputs_.count && inputs[count] < stop) count++;
        scales = matrix.scales + group * padded_rows(matrix);
        offsets = matrix.offsets ? matrix.offsets + group * padded_rows(matrix) : nullptr;
    }
};

// y[first .. last) += scales * sums[0 .. last - first) + offsets * total, the sum of the group's activations.
inline void add_scaled(const InputGroup& group, float total, const float* sums, int64_t first, int64_t last, float* y) {
    for (int64_t c = first; c < last; c += Isa::width)
        Isa::store(y + c, Isa::fma(Isa::load(sums + c - first), Isa::load(group.scales + c), Isa::load(y + c)));
    if (!group.offsets) return;
    const Vec all = Isa::set1(total);
    for (int64_t c = first; c < last; c += Isa::width)
        Isa::store(y + c, Isa::fma(all, Isa::load(group.offsets + c), Isa::load(y + c)));
}

template <Kind kind>
void inputs_as_floats(const Matrix& matrix, const InputGroup& group, const float* x, int64_t first, int64_t last,
                      float* y) {
    Isa::Decoder<kind> decoder(matrix.table);
    decoder.scale(1.0f);
    float total = 0;
    for (int64_t i = 0; i < group.count; i++) total += x[group.inputs[i]];
    const int64_t row_bytes = Row<kind>::columns_to_bytes(padded_rows(matrix));
    for (int64_t c = first; c < last; c += block) {
        Vec sums[vecs];
        for (Vec& sum : sums) sum = Isa::zero();
        for (int64_t i = 0; i < group.count; i++) {
            const int64_t input = group.inputs[i];
            const Vec factor = Isa::set1(x[input]);
            Vec weights[vecs];
            decoder.decode(matrix.codes + input * row_bytes + Row<kind>::columns_to_bytes(c), weights);
            for (int k = 0; k < vecs; k++) sums[k] = Isa::fma(factor, weights[k], sums[k]);
        }
        float of_block[block];
        for (int k = 0; k < vecs; k++) Isa::store(of_block + k * Isa::width, sums[k]);
        add_scaled(group, total, of_block, c, c + block, y);
    }
}

constexpr int64_t panel_columns = 2048;  // of an input's row that are read before the next row: their sums stay near

// The same in integers: activations rounded to 16 bits as for a product by rows. `group` begins at place `at` of `inputs`.
template <Kind kind, typename Vectors = Isa>  // a parameter: some have no such operations
void inputs_as_integers(const Matrix& matrix, const InputGroup& group, const Selection& inputs, int64_t at,
                        const float* x, int64_t first, int64_t last, float* y) {
    using Block = typename Vectors::template SumBlock<kind, 128>;  // of one scale, whatever the size of the groups
    const Isa::Table table(matrix.table);
    const int64_t row_bytes = Row<kind>::columns_to_bytes(padded_rows(matrix));
    const int64_t padded = rounded_up(group.count, 8);
    float values[128] = {};
    for (int64_t i = 0; i < group.count; i++) values[i] = x[group.inputs[i]];
    const float scale = from_bits(largest_magnitude_bits(values, padded)) / whole_limit;
    const float inverse = scale >= smallest_scale ? 1.0f / scale : 0.0f;
    uint32_t lows[32], highs[32];  // the bytes of 4 factors side by side are what a SumBlock takes
    uint8_t *low = reinterpret_cast<uint8_t*>(lows), *high = reinterpret_cast<uint8_t*>(highs);
    int32_t total = 0;
    for (int64_t i = 0; i < padded; i++) {
        const int32_t number = static_cast<int32_t>(to_whole(values[i] * inverse, whole_limit));
        total += number;
        low[i] = static_cast<uint8_t>(number);
        high[i] = static_cast<uint8_t>((number + 128) >> 8);
    }
    const int32_t constant = -128 * total;
    const int64_t ahead = 8 + bytes_ahead / Row<kind>::columns_to_bytes(smaller(last - first, panel_columns));
    const auto codes_at = [&](int64_t place) {
        return matrix.codes + inputs.index[smaller(place, inputs.count - 1)] * row_bytes;
    };
    for (int64_t start = first; start < last; start += panel_columns) {
        const int64_t stop = smaller(start + panel_columns, last);
        int32_t sums[panel_columns];
        for (int64_t c = start; c < stop; c += Block::columns) {
            Block::start(&constant, sums + c - start);
            for (int64_t scale = c; scale < c + Block::columns; scale += 32) prefetch(group.scales + scale);
        }
        for (int64_t i = 0; i < padded; i += 8) {
            const uint8_t *codes[8], *later[8];
            for (int64_t k = 0; k < 8; k++) {
                codes[k] = codes_at(at + smaller(i + k, group.count - 1));
                later[k] = codes_at(at + i + k + ahead);
            }
            for (int64_t c = start; c < stop; c += Block::columns) {
                const int64_t byte = Row<kind>::columns_to_bytes(c);
                for (const uint8_t* from : later) prefetch(from + byte);
                Block::add_8_rows(codes, byte, row_bytes - byte, table, lows + i / 4, highs + i / 4, 1, sums + c - start);
            }
        }
        for (int64_t c = start; c < stop; c += Block::columns) {
            float scaled[block_columns] = {};
            Block::finish(sums + c - start, &scale, scaled);
            add_scaled(group, scale * static_cast<float>(total), scaled, c, c + Block::columns, y);
        }
    }
}

// Rows [first, last), multiples of block_columns, of the inputs that `inputs` lists (never null) times x [cols] -> y.
inline void product_inputs(const Matrix& matrix, const Selection& inputs, int64_t first, int64_t last, const float* x,
                           Compute compute, float* y) {
    bool finite = true;
    for (int64_t i = 0; i < inputs.count; i++) finite = finite && (bits_of(x[inputs.index[i]]) & 0x7fffffff) < 0x7f800000;
    const Vec start = Isa::set1(finite || compute != int8 ? 0.0f : NAN);
    for (int64_t c = first; c < last; c += Isa::width) Isa::store(y + c, start);
    if (!finite && compute == int8) return;
    const auto of_kind = [&](auto which) {
        constexpr Kind kind = static_cast<Kind>(decltype(which)::value);
        for (int64_t at = 0; at < inputs.count;) {
            const InputGroup group(matrix, inputs, at);
            bool done = false;
            if constexpr (Isa::sums_rows) {
                done = compute == int8;
                if (done) inputs_as_integers<kind>(matrix, group, inputs, at, x, first, last, y);
            }
            if (!done) inputs_as_floats<kind>(matrix, group, x, first, last, y);
            at += group.count;
        }
    };
    if (matrix.table) return of_kind(Size<four_bit>());
    of_kind(Size<eight_bit>());
}

// x [cols] -> out [padded rows].
void input_product(const Matrix& matrix, const Selection& inputs, const float* x, Compute compute, float* out,
                   int threads) {
    const int64_t units = padded_rows(matrix) / block_columns;
    threads = static_cast<int>(smaller(useful_threads(threads, inputs.count * matrix.rows), units));
#pragma omp parallel for num_threads(threads)
    for (int part = 0; part < threads; part++)
        product_inputs(matrix, inputs, units * part / threads * block_columns,
                       units * (part + 1) / threads * block_columns, x, compute, out);
}

}  // namespace
}  // namespace hf_sparse
