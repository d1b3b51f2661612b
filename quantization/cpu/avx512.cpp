// AVX-512 with VNNI: 16 floats a register, 64 products of bytes an instruction.

#include "avx512_isa.h"
#include "loops.h"

namespace hf_sparse {

const Kernels avx512_kernels = {quantize, dequantize, turn, row_product, accumulate, input_product, active_neurons,
    decode_bytes, decode, nullptr, nullptr};

}  // namespace hf_sparse
