// Plain C++, for any CPU.

#include "portable_isa.h"
#include "loops.h"

namespace hf_sparse {

const Kernels portable_kernels = {quantize, dequantize, turn, row_product, accumulate, input_product, active_neurons,
    decode_bytes, decode, nullptr, nullptr};

}  // namespace hf_sparse
