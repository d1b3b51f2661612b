// AVX2 with AVX-VNNI.

#include "avx2_isa.h"
#include "loops.h"

namespace hf_sparse {

const Kernels avx_vnni_kernels = {quantize, dequantize, turn, row_product, accumulate, input_product, active_neurons,
    decode_bytes, decode, nullptr, nullptr};

}  // namespace hf_sparse
