// AVX-512 with VNNI and VBMI.

#include "avx512_isa.h"
#include "loops.h"

namespace hf_sparse {

const Kernels avx512_vbmi_kernels = {quantize, dequantize, turn, row_product, accumulate, input_product, active_neurons,
    decode_bytes, decode, nullptr, nullptr};

}  // namespace hf_sparse
