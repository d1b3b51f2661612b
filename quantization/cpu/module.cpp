// The Python face of the kernels. Arguments are addresses and sizes that quantization/ and modeling/engine.py have
// checked; what is checked here is the index, because it is the one thing that costs a pass over data.

#include <nanobind/nanobind.h>

#include <cstdlib>
#include <deque>
#include <new>
#include <vector>

#include "kernels.h"

namespace nb = nanobind;

namespace hf_sparse {

void* allocate(size_t bytes) {
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (!memory) throw std::bad_alloc();
    return memory;
}

void release(void* memory) { std::free(memory); }

namespace {

#ifdef HF_SPARSE_AMX
const Kernels amx_kernels = [] {
    Kernels kernels = avx512_vbmi_kernels;
    kernels.many_row_product = amx_row_product;
    kernels.many_accumulate = amx_accumulate;
    return kernels;
}();
#endif

const Kernels* const by_level[] = {
    &portable_kernels,
#ifdef HF_SPARSE_X86
    &avx2_kernels,     &avx512_kernels, &avx512_vbmi_kernels,
#endif
#ifdef HF_SPARSE_AVX_VNNI
    &avx_vnni_kernels,
#endif
#ifdef HF_SPARSE_AMX
    &amx_kernels,
#endif
};

int place_of(const Kernels* kernels) {
    int place = 0;
    while (by_level[place] != kernels) place++;
    return place;
}

#ifdef HF_SPARSE_AVX_VNNI
// Not every compiler's __builtin_cpu_supports knows this one. CPUID leaf 7, subleaf 1, EAX bit 4.
bool has_avx_vnni() {
    unsigned eax = 7, ebx = 0, ecx = 1, edx = 0;
    __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    return (eax >> 4 & 1) != 0;
}
#endif

// Names of what this CPU can run, best first, with their place in by_level.
nb::dict levels() {
    nb::dict found;
#ifdef HF_SPARSE_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma")) {
        const bool vbmi = __builtin_cpu_supports("avx512vbmi");
#ifdef HF_SPARSE_AMX
        if (vbmi && amx_available()) found["amx"] = place_of(&amx_kernels);
#endif
        if (vbmi) found["avx512_vbmi"] = place_of(&avx512_vbmi_kernels);
        found["avx512_vnni"] = place_of(&avx512_kernels);
    }
#ifdef HF_SPARSE_AVX_VNNI
    if (avx2 && has_avx_vnni()) found["avx_vnni"] = place_of(&avx_vnni_kernels);
#endif
    if (avx2) found["avx2"] = place_of(&avx2_kernels);
#endif
    found["portable"] = place_of(&portable_kernels);
    return found;
}

template <typename T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

bool strictly_ascending(const Selection& selection, int64_t rows) {
    if (!selection.index) return true;
    int64_t previous = -1;
    for (int64_t i = 0; i < selection.count; i++) {
        if (selection.index[i] <= previous) return false;
        previous = selection.index[i];
    }
    return previous < rows;
}

bool quantize(int level, uintptr_t weight, int64_t rows, int64_t cols, int64_t group_size, const Rule& rule,
              uintptr_t codes, uintptr_t scales, uintptr_t offsets, int threads) {
    return by_level[level]->quantize(pointer<const float>(weight), rows, cols, group_size, rule,
                                     pointer<uint8_t>(codes), pointer<uint16_t>(scales), pointer<uint16_t>(offsets),
                                     threads);
}

bool dequantize(int level, const Matrix& matrix, uintptr_t index, int64_t count, uintptr_t out, bool bf16, int threads) {
    const Selection selection{pointer<const int64_t>(index), count};
    if (!strictly_ascending(selection, matrix.rows)) return false;
    by_level[level]->dequantize(matrix, selection, pointer<void>(out), bf16, threads);
    return true;
}

void turn(int level, uintptr_t codes, bool packed, int64_t rows, int64_t cols, int64_t row_bytes, uintptr_t out,
          int64_t out_bytes, int threads) {
    by_level[level]->turn(pointer<const uint8_t>(codes), packed, rows, cols, row_bytes, pointer<uint8_t>(out), out_bytes,
                          threads);
}

bool row_product(int level, const Matrix& matrix, uintptr_t index, int64_t count, uintptr_t x, int64_t n, int compute,
                 uintptr_t out, int threads) {
    const Selection selection{pointer<const int64_t>(index), count};
    if (!strictly_ascending(selection, matrix.rows)) return false;
    by_level[level]->row_product(matrix, selection, pointer<const float>(x), n, static_cast<Compute>(compute),
                                 pointer<float>(out), threads);
    return true;
}

bool accumulate(int level, const Matrix& matrix, uintptr_t index, int64_t count, uintptr_t a, int64_t n, int compute,
                uintptr_t out, int threads) {
    const Selection selection{pointer<const int64_t>(index), count};
    if (!strictly_ascending(selection, matrix.rows)) return false;
    by_level[level]->accumulate(matrix, selection, pointer<const float>(a), n, static_cast<Compute>(compute),
                                pointer<float>(out), threads);
    return true;
}

bool input_product(int level, const Matrix& matrix, uintptr_t index, int64_t count, uintptr_t x, int compute,
                   uintptr_t out, int threads) {
    const Selection inputs{pointer<const int64_t>(index), count};
    if (!strictly_ascending(inputs, matrix.cols)) return false;
    by_level[level]->input_product(matrix, inputs, pointer<const float>(x), static_cast<Compute>(compute),
                                   pointer<float>(out), threads);
    return true;
}

// Whether there are products of their own for many rows of activations.
bool has_many(int level) { return by_level[level]->many_row_product != nullptr; }

bool many_row_product(int level, const Matrix& matrix, uintptr_t index, int64_t count, uintptr_t x, int64_t n,
                      uintptr_t out, int threads) {
    const Selection selection{pointer<const int64_t>(index), count};
    if (!strictly_ascending(selection, matrix.rows)) return false;
    by_level[level]->many_row_product(matrix, selection, pointer<const float>(x), n, pointer<float>(out), threads);
    return true;
}

bool many_accumulate(int level, const Matrix& matrix, uintptr_t index, int64_t count, uintptr_t a, int64_t n,
                     uintptr_t out, int threads) {
    const Selection selection{pointer<const int64_t>(index), count};
    if (!strictly_ascending(selection, matrix.rows)) return false;
    by_level[level]->many_accumulate(matrix, selection, pointer<const float>(a), n, pointer<float>(out), threads);
    return true;
}

int64_t active_neurons(int level, const Predictor& predictor, uintptr_t x, int compute, uintptr_t index, int threads) {
    return by_level[level]->active_neurons(predictor, pointer<const float>(x), static_cast<Compute>(compute),
                                           pointer<int64_t>(index), threads);
}

// Decoder layers, or parts of them, by address: the tensors behind them must live as long.
class Decoder {
  public:
    Decoder(int level, int64_t hidden) : kernels_(by_level[level]), hidden_(hidden) {}

    void add(const Layer& layer) {
        layers_.push_back(layer);
        pointers_.push_back(&layers_.back());
    }
    void set_head(const Head& head) { head_ = head; }

    // Layers [first, first + count), then the head where `logits` is given. `rotations`: int64 [4, 2], addresses of
    // cosines and sines: of the position in each table, then of the slot, or 0. `caches`: int64 [count, 2], the address
    // of each layer's table of pages and its code; `ring`: int64 [3], see Ring. The caller sees to it that one runs at a
    // time.
    void run(int64_t first, int64_t count, bool whole_layers, uintptr_t input, uintptr_t output, uintptr_t logits,
             int64_t held, uintptr_t ring, uintptr_t rotations, uintptr_t caches, bool rules, uintptr_t computed,
             int threads) {
        tables_.resize(static_cast<size_t>(count));
        const int64_t* of_layers = pointer<const int64_t>(caches);
        for (int64_t i = 0; of_layers && i < count; i++) {
            tables_[static_cast<size_t>(i)] = {pointer<const int64_t>(static_cast<uintptr_t>(of_layers[2 * i])),
                                               static_cast<int>(of_layers[2 * i + 1])};
        }
        Step step = {};
        step.layers = pointers_.data() + first;
        step.layer_count = count;
        step.head = logits ? &head_ : nullptr;
        step.whole_layers = whole_layers;
        step.input = pointer<const float>(input);
        step.output = pointer<float>(output);
        step.logits = pointer<float>(logits);
        step.hidden = hidden_;
        step.held = held;
        if (const int64_t* places = pointer<const int64_t>(ring)) step.ring = {places[0], places[1], places[2]};
        const int64_t* of_rotations = pointer<const int64_t>(rotations);
        const auto table = [&](int i) { return pointer<const float>(static_cast<uintptr_t>(of_rotations[i])); };
        for (int i = 0; of_rotations && i < 2; i++) {
            step.cos[i] = table(2 * i);
            step.sin[i] = table(2 * i + 1);
            step.sink_cos[i] = table(4 + 2 * i);
            step.sink_sin[i] = table(5 + 2 * i);
        }
        step.caches = tables_.data();
        step.rules = rules;
        step.computed = pointer<int64_t>(computed);
        step.threads = threads;
        const size_t bytes = static_cast<size_t>(kernels_->decode_bytes(step));
        if (memory_bytes_ < bytes) {
            release(memory_);
            memory_ = nullptr;
            memory_bytes_ = 0;
            memory_ = static_cast<char*>(allocate(bytes));
            memory_bytes_ = bytes;
        }
        kernels_->decode(step, memory_);
    }

    ~Decoder() { release(memory_); }
    Decoder(const Decoder&) = delete;
    Decoder& operator=(const Decoder&) = delete;

  private:
    const Kernels* kernels_;
    int64_t hidden_;
    std::deque<Layer> layers_;
    std::vector<const Layer*> pointers_;
    Head head_ = {};
    std::vector<CacheTable> tables_;
    char* memory_ = nullptr;
    size_t memory_bytes_ = 0;
};

}  // namespace
}  // namespace hf_sparse

NB_MODULE(_kernels, module) {
    using namespace hf_sparse;
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    module.attr("page_tokens") = page_tokens;

    nb::class_<Matrix>(module, "Matrix")
        .def("__init__", [](Matrix* self, uintptr_t codes, uintptr_t scales, uintptr_t offsets, uintptr_t table,
                            int64_t rows, int64_t cols, int64_t group_size, bool by_input) {
            new (self) Matrix{pointer<const uint8_t>(codes), pointer<const uint16_t>(scales),
                              pointer<const uint16_t>(offsets), pointer<const int8_t>(table), rows, cols, group_size,
                              by_input};
        });
    nb::class_<Rule>(module, "Rule")
        .def("__init__", [](Rule* self, uintptr_t thresholds, float divisor, bool signed_peak, bool offset) {
            new (self) Rule{pointer<const float>(thresholds), divisor, signed_peak, offset};
        });
    nb::class_<Linear>(module, "Linear").def("__init__", [](Linear* self, const Matrix& matrix, uintptr_t bias) {
        new (self) Linear{matrix, pointer<const float>(bias)};
    });
    nb::class_<Predictor>(module, "Predictor")
        .def("__init__", [](Predictor* self, const Matrix& fc1, const Matrix& fc2, uintptr_t bias) {
            new (self) Predictor{fc1, fc2, pointer<const float>(bias)};
        });
    nb::class_<Mlp>(module, "Mlp")
        .def("__init__",
             [](Mlp* self, const Linear& up, const Linear& down, int activation, int compute) {
                 new (self) Mlp{};
                 self->up = up;
                 self->down = down;
                 self->activation = static_cast<Activation>(activation);
                 self->compute = static_cast<Compute>(compute);
             })
        .def_rw("gate", &Mlp::gate)
        .def_rw("predictor", &Mlp::predictor)
        .def_rw("rule", &Mlp::rule)
        .def("set_thresholds", [](Mlp& self, uintptr_t inputs, uintptr_t gates, uintptr_t hidden) {
            self.inputs_below = pointer<const float>(inputs);
            self.gates_below = pointer<const float>(gates);
            self.hidden_below = pointer<const float>(hidden);
        });
    nb::class_<Attention>(module, "Attention")
        .def("__init__",
             [](Attention* self, const Linear& q, const Linear& k, const Linear& v, const Linear& o, int64_t heads,
                int64_t kv_heads, int64_t head_dim, float scaling, int compute) {
                 new (self) Attention{};
                 self->q = q;
                 self->k = k;
                 self->v = v;
                 self->o = o;
                 self->heads = heads;
                 self->kv_heads = kv_heads;
                 self->head_dim = head_dim;
                 self->rotation = -1;
                 self->scaling = scaling;
                 self->compute = static_cast<Compute>(compute);
             })
        .def("set_norms",
             [](Attention& self, uintptr_t q_norm, uintptr_t k_norm, bool all_heads, float epsilon) {
                 self.q_norm = pointer<const float>(q_norm);
                 self.k_norm = pointer<const float>(k_norm);
                 self.norms_all_heads = all_heads;
                 self.norm_epsilon = epsilon;
             })
        .def("set_rotation",
             [](Attention& self, int rotation, int64_t rotary_dim) {
                 self.rotation = rotation;
                 self.rotary_dim = rotary_dim;
             })
        .def("set_thresholds",
             [](Attention& self, uintptr_t inputs, uintptr_t attended) {
                 self.inputs_below = pointer<const float>(inputs);
                 self.attended_below = pointer<const float>(attended);
             })
        .def_rw("predictor", &Attention::predictor)
        .def_rw("softcap", &Attention::softcap)
        .def_rw("window", &Attention::window);
    nb::class_<Layer>(module, "Layer")
        .def("__init__", [](Layer* self) { new (self) Layer{}; })
        .def("set_norms",
             [](Layer& self, uintptr_t before_attention, uintptr_t after_attention, uintptr_t before_mlp,
                uintptr_t after_mlp, float epsilon) {
                 const uintptr_t given[] = {before_attention, after_attention, before_mlp, after_mlp};
                 for (int i = 0; i < 4; i++) self.norms[i] = pointer<const float>(given[i]);
                 self.epsilon = epsilon;
             })
        .def_rw("attention", &Layer::attention)
        .def_rw("mlp", &Layer::mlp);
    nb::class_<Head>(module, "Head")
        .def("__init__", [](Head* self, uintptr_t norm, float epsilon, const Linear& linear, float softcap, bool rounds,
                            int compute) {
            new (self) Head{pointer<const float>(norm), epsilon, linear, softcap, rounds, static_cast<Compute>(compute)};
        });
    nb::class_<Decoder>(module, "Decoder")
        .def(nb::init<int, int64_t>())
        .def("add", &Decoder::add)
        .def("set_head", &Decoder::set_head)
        .def("run", &Decoder::run, Unlocked());

    module.def("levels", &levels);
    module.def("quantize", &quantize, Unlocked());
    module.def("dequantize", &dequantize, Unlocked());
    module.def("turn", &turn, Unlocked());
    module.def("row_product", &row_product, Unlocked());
    module.def("accumulate", &accumulate, Unlocked());
    module.def("input_product", &input_product, Unlocked());
    module.def("has_many", &has_many);
    module.def("many_row_product", &many_row_product, Unlocked());
    module.def("many_accumulate", &many_accumulate, Unlocked());
    module.def("active_neurons", &active_neurons, Unlocked());
}
