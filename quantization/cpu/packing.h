// Weights to codes and back. Part of loops.h.
#pragma once

namespace hf_sparse {
namespace {

// One group of `size` weights (padded with zeros) to codes, a byte each, and the scale. False where a weight is out of
// bounds.
inline bool quantize_group(const float* values, int64_t size, const Rule& rule, uint8_t* codes, uint16_t* scale_out,
                           uint16_t* offset_out) {
    const uint32_t magnitude = largest_magnitude_bits(values, size);
    if (magnitude > (rule.offset ? limit_bits_with_offset : limit_bits)) return false;
    float peak = from_bits(magnitude), offset = 0;
    if (rule.signed_peak || rule.offset) {
        float highest = values[0], lowest = values[0];
        for (int64_t i = 1; i < size; i++) {
            highest = values[i] > highest ? values[i] : highest;
            lowest = values[i] < lowest ? values[i] : lowest;
        }
        if (rule.offset) {
            *offset_out = to_bf16(lowest);
            offset = from_bf16(*offset_out);
            peak = highest > offset ? highest - offset : 0.0f;
        } else {
            peak = highest == peak ? peak : -peak;
        }
    }
    const float rounded = from_bf16(to_bf16(peak / rule.divisor));
    const float scale = (rounded < 0 ? -rounded : rounded) < smallest_scale ? 0.0f : rounded;
    *scale_out = to_bf16(scale);
    float ratios[128];
    for (int64_t i = 0; i < size; i++) ratios[i] = scale == 0 ? 0.0f : (values[i] - offset) / scale;
    if (!rule.thresholds) {
        for (int64_t i = 0; i < size; i++)
            codes[i] = static_cast<uint8_t>(static_cast<int8_t>(to_whole(ratios[i], 127.0f)));
        return true;
    }
    int32_t counts[128] = {};
    for (int k = 0; k < 15; k++) {
        const float threshold = rule.thresholds[k];
        for (int64_t i = 0; i < size; i++) counts[i] += ratios[i] > threshold;
    }
    for (int64_t i = 0; i < size; i++) codes[i] = static_cast<uint8_t>(counts[i]);
    return true;
}

bool quantize(const float* weight, int64_t rows, int64_t cols, int64_t group_size, const Rule& rule, uint8_t* codes,
              uint16_t* scales, uint16_t* offsets, int threads) {
    const int64_t groups = groups_of(cols, group_size);
    const int64_t group_bytes = rule.thresholds ? group_size / 2 : group_size;
    bool finite = true;
#pragma omp parallel for num_threads(useful_threads(threads, rows* cols)) reduction(&& : finite)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t group = 0; group < groups; group++) {
            float values[128] = {};
            const int64_t start = group * group_size;
            const size_t present = static_cast<size_t>(smaller(group_size, cols - start));
            std::memcpy(values, weight + row * cols + start, present * sizeof(float));
            uint8_t bytes[128];
            uint16_t* offset = rule.offset ? offsets + row * groups + group : nullptr;
            finite = quantize_group(values, group_size, rule, bytes, scales + row * groups + group, offset) && finite;
            uint8_t* out = codes + (row * groups + group) * group_bytes;
            if (!rule.thresholds) {
                std::memcpy(out, bytes, static_cast<size_t>(group_bytes));
                continue;
            }
            for (int64_t i = 0; i < group_bytes; i++) {
                const uint8_t* pair = bytes + i / 16 * block + i % 16;
                out[i] = static_cast<uint8_t>(pair[0] | pair[16] << 4);
            }
        }
    }
    return finite;
}

template <Kind kind>
void dequantize_rows(const Matrix& matrix, const Selection& selection, void* out, bool bf16, int threads) {
    const int64_t cols = matrix.cols;
    const int64_t padded = groups_of(cols, matrix.group_size) * matrix.group_size;
#pragma omp parallel num_threads(useful_threads(threads, selection.count* cols))
    {
        Isa::Decoder<kind> decoder(matrix.table);
#pragma omp for
        for (int64_t i = 0; i < selection.count; i++) {
            const Row<kind> row(matrix, row_at(selection, i));
            for (int64_t start = 0; start < cols; start += tile) {
                float values[tile];
                decode_columns(row, decoder, start, smaller(start + tile, padded), matrix.group_size, values);
                const int64_t count = smaller(tile, cols - start);
                const int64_t at = i * cols + start;
                if (bf16) {
                    uint16_t* to = static_cast<uint16_t*>(out) + at;
                    for (int64_t c = 0; c < count; c++) to[c] = to_bf16(values[c]);
                } else {
                    std::memcpy(static_cast<float*>(out) + at, values, static_cast<size_t>(count) * sizeof(float));
                }
            }
        }
    }
}

void dequantize(const Matrix& matrix, const Selection& selection, void* out, bool bf16, int threads) {
    if (matrix.table) {
        dequantize_rows<four_bit>(matrix, selection, out, bf16, threads);
    } else {
        dequantize_rows<eight_bit>(matrix, selection, out, bf16, threads);
    }
}

// Codes [rows, row_bytes] -> those of the columns as rows, [cols, out_bytes], which may have room for more; that is zero.
void turn(const uint8_t* codes, bool packed, int64_t rows, int64_t cols, int64_t row_bytes, uint8_t* out,
          int64_t out_bytes, int threads) {
    const int64_t out_columns = packed ? 2 * out_bytes : out_bytes, side = 32, bytes = packed ? side / 2 : side;
#pragma omp parallel for num_threads(useful_threads(threads, rows* cols))
    for (int64_t from_column = 0; from_column < cols; from_column += side) {
        const int64_t columns = smaller(side, cols - from_column);
        for (int64_t from_row = 0; from_row < out_columns; from_row += side) {
            uint8_t turned[side][side] = {};  // [column][row]
            for (int64_t r = 0; r < smaller(side, rows - from_row); r++) {
                const uint8_t* row = codes + (from_row + r) * row_bytes + (packed ? from_column / 2 : from_column);
                if (packed) {
                    for (int64_t c = 0; c < 16; c++) {
                        turned[c][r] = row[c] & 15;
                        turned[c + 16][r] = row[c] >> 4;
                    }
                } else {
                    for (int64_t c = 0; c < columns; c++) turned[c][r] = row[c];
                }
            }
            for (int64_t c = 0; c < columns; c++) {
                uint8_t* to = out + (from_column + c) * out_bytes + (packed ? from_row / 2 : from_row);
                for (int64_t k = 0; k < bytes; k++)
                    to[k] = packed ? static_cast<uint8_t>(turned[c][k] | turned[c][k + 16] << 4) : turned[c][k];
            }
        }
    }
}

}  // namespace
}  // namespace hf_sparse
