// Replay of recorded launches: the body of a torch operator on a GPU, without Python.
//
// A plan is what one call of an operator launched, for one key: dtypes, sizes, strides and
// alignments of its tensors, its other arguments, device and stream. A call whose key has a plan
// allocates the outputs, puts the tensors' addresses into the recorded parameters, and launches.
// Any other call goes to Python, which solves it and may hand back a plan for the next one.
//
// The CUDA driver and torch's current stream are found at run time by name, so that this builds
// without CUDA's headers and is tested without a GPU.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace py = pybind11;

namespace {

// --- the driver ----------------------------------------------------------------------------------

// CUlaunchAttribute and CUlaunchConfig of the CUDA driver API, "Execution Control".
struct Attribute {
  int id;
  char pad[4];
  union {
    unsigned size[3];
    int flag;
    char bytes[64];
  } value;
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
};

// CUlaunchAttributeID.
constexpr int COOPERATIVE = 2, CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6;

struct Driver {
  int (*launch)(const LaunchConfig*, void* function, void** parameters, void** extra) = nullptr;
  int (*is_capturing)(void* stream, int* status) = nullptr;
  int32_t (*current_stream)(int32_t device, void** stream) = nullptr;
};
Driver driver;

template <class Function>
void find(Function& to, const std::string& library, const char* name) {
  void* handle = dlopen(library.c_str(), RTLD_LAZY);
  TORCH_CHECK(handle, library, " cannot be loaded: ", dlerror());
  to = reinterpret_cast<Function>(dlsym(handle, name));
  TORCH_CHECK(to, library, " has no ", name);
}

void connect(const std::string& cuda, const std::string& torch) {
  find(driver.launch, cuda, "cuLaunchKernelEx");
  find(driver.is_capturing, cuda, "cuStreamIsCapturing");
  find(driver.current_stream, torch, "aoti_torch_get_current_cuda_stream");
}

void* stream_of(c10::Device device) {
  void* stream = nullptr;
  const int index = device.has_index() ? device.index() : 0;
  TORCH_CHECK(driver.current_stream(index, &stream) == 0, "no current stream of ", device);
  return stream;
}

// True too where the driver does not say, as of the legacy stream while another one captures.
bool capturing(void* stream) {
  int status = 0;
  return driver.is_capturing(stream, &status) != 0 || status != 0;
}

// --- plans ---------------------------------------------------------------------------------------

// The address of a byte of a tensor, in a launch's parameters.
struct Patch {
  uint32_t at, tensor;
  int64_t offset;
};

struct Launch {
  uint64_t function;
  std::array<unsigned, 3> grid, block, cluster;  // a cluster of 0 is none
  unsigned shared_bytes;
  bool cooperative, beside;  // `beside`: it starts while the launch before it runs
  std::vector<uint32_t> starts;  // of each parameter in `bytes`
  std::string bytes;
  std::vector<Patch> patches;
};

// A tensor that a call makes: contiguous.
struct New {
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
};

// Tensors are numbered: those of the arguments, the outputs, then the scratch memory.
struct Plan {
  std::vector<Launch> launches;
  std::vector<New> outputs, scratch;
  std::vector<uint32_t> written;  // the arguments' tensors that a call writes to

  void launch_all(const uint64_t* addresses, void* stream) const {
    for (const Launch& launch : launches) {
      alignas(64) char small[4096];
      std::vector<char> large;
      char* bytes = small;
      if (launch.bytes.size() > sizeof(small)) {
        large.resize(launch.bytes.size() + 64);
        bytes = large.data() + (64 - reinterpret_cast<uintptr_t>(large.data()) % 64);
      }
      std::memcpy(bytes, launch.bytes.data(), launch.bytes.size());
      for (const Patch& patch : launch.patches) {
        const uint64_t address = addresses[patch.tensor] + patch.offset;
        std::memcpy(bytes + patch.at, &address, sizeof(address));
      }
      c10::SmallVector<void*, 64> parameters;
      for (uint32_t start : launch.starts) parameters.push_back(bytes + start);
      Attribute attributes[3];
      unsigned count = 0;
      if (launch.cluster[0]) {
        attributes[count].id = CLUSTER_DIMENSION;
        std::copy(launch.cluster.begin(), launch.cluster.end(), attributes[count++].value.size);
      }
      if (launch.cooperative) {
        attributes[count].id = COOPERATIVE;
        attributes[count++].value.flag = 1;
      }
      if (launch.beside) {
        attributes[count].id = PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count++].value.flag = 1;
      }
      const auto [gx, gy, gz] = launch.grid;
      const auto [bx, by, bz] = launch.block;
      const LaunchConfig config = {
          {gx, gy, gz}, {bx, by, bz}, launch.shared_bytes, stream, attributes, count};
      void* function = reinterpret_cast<void*>(launch.function);
      const int error = driver.launch(&config, function, parameters.data(), nullptr);
      TORCH_CHECK(error == 0, "cuLaunchKernelEx: error ", error);
    }
  }
};

// --- keys ----------------------------------------------------------------------------------------

using Key = c10::SmallVector<uint64_t, 64>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size();
    for (uint64_t word : key) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

enum Kind : uint64_t { NONE, TENSOR, INTEGER, FLOAT, BOOL, TEXT };

// Kernels choose by an address modulo 16 and by nothing else of it.
void add_to_key(Key& key, const at::Tensor& tensor) {
  const uint64_t place = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16;
  const uint64_t dtype = static_cast<uint64_t>(tensor.scalar_type());
  key.push_back(TENSOR | dtype << 8 | place << 16 | uint64_t(tensor.dim()) << 24);
  for (int64_t size : tensor.sizes()) key.push_back(size);
  for (int64_t stride : tensor.strides()) key.push_back(stride);
}

void add_to_key(Key& key, const c10::IValue& value) {
  if (value.isTensor()) return add_to_key(key, value.toTensor());
  if (value.isNone()) return key.push_back(NONE);
  if (value.isBool()) return key.push_back(BOOL | uint64_t(value.toBool()) << 8);
  if (value.isInt()) {
    key.push_back(INTEGER);
    return key.push_back(value.toInt());
  }
  if (value.isDouble()) {
    const double number = value.toDouble();
    key.push_back(FLOAT);
    key.push_back(0);
    return std::memcpy(&key.back(), &number, sizeof(number)), void();
  }
  TORCH_CHECK(value.isString(), "no key of ", value.tagKind());
  const std::string& text = value.toStringRef();
  key.push_back(TEXT | text.size() << 8);
  for (size_t i = 0; i < text.size(); i += 8) {
    key.push_back(0);
    std::memcpy(&key.back(), text.data() + i, std::min<size_t>(8, text.size() - i));
  }
}

// --- operators -----------------------------------------------------------------------------------

py::object to_python(const c10::IValue& value) {
  if (value.isTensor()) return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isString()) return py::str(value.toStringRef());
  return py::none();
}

py::object call(const py::object& function, const py::tuple& arguments) {
  PyObject* result = PyObject_Call(function.ptr(), arguments.ptr(), nullptr);
  if (!result) throw python_error();
  return py::reinterpret_steal<py::object>(result);
}

// Keys of one operator after which it forgets all: sizes that never come again would fill memory.
constexpr size_t MOST_KEYS = 4096;

struct Entry {
  int calls = 0;
  std::shared_ptr<const Plan> plan;
};

// What an operator knows; Python objects live as long as the process.
struct Table {
  py::object* run;     // run(*arguments) solves a call
  py::object* record;  // record(*arguments) returns the Plan of a solved call, or None
  bool list;           // outputs are returned as one list
  std::mutex mutex;
  std::unordered_map<Key, Entry, KeyHash> entries;
  uint64_t replayed = 0;
};

std::vector<Table*>& tables() {
  static auto* all = new std::vector<Table*>;
  return *all;
}

void push_outputs(torch::jit::Stack& stack, std::vector<at::Tensor> outputs, bool list) {
  if (list) return torch::jit::push(stack, std::move(outputs));
  for (at::Tensor& tensor : outputs) torch::jit::push(stack, std::move(tensor));
}

std::vector<at::Tensor> outputs_of(const py::object& result) {
  std::vector<at::Tensor> outputs;
  if (THPVariable_Check(result.ptr())) return {THPVariable_Unpack(result.ptr())};
  if (!result.is_none()) {
    for (py::handle one : result) outputs.push_back(THPVariable_Unpack(one.ptr()));
  }
  return outputs;
}

struct Replayed final : c10::OperatorKernel {
  explicit Replayed(Table* table) : table(table) {}
  Table* table;

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    const c10::Device device = arguments[0].toTensor().device();
    const c10::OptionalDeviceGuard guard(device);
    void* stream = stream_of(device);
    Key key = {reinterpret_cast<uintptr_t>(stream), uint64_t(device.index())};
    for (const c10::IValue& value : arguments) add_to_key(key, value);
    // A graph's launches may run on any stream, while those of a plan share its counters.
    const bool fresh = capturing(stream);
    bool record = false;
    std::shared_ptr<const Plan> plan;
    if (!fresh) {
      const std::lock_guard lock(table->mutex);
      if (table->entries.size() >= MOST_KEYS) table->entries.clear();
      Entry& entry = table->entries[key];
      plan = entry.plan;
      // The first call compiles and loads kernels, which a recording should not.
      record = !plan && ++entry.calls == 2;
      table->replayed += bool(plan);
    }
    std::vector<at::Tensor> outputs =
        plan ? replay(*plan, arguments, device, stream) : solve(arguments, record, key);
    torch::jit::drop(*stack, count);
    push_outputs(*stack, std::move(outputs), table->list);
  }

 private:
  static std::vector<at::Tensor> replay(const Plan& plan, at::ArrayRef<c10::IValue> arguments,
                                        c10::Device device, void* stream) {
    c10::SmallVector<uint64_t, 32> addresses;
    auto add = [&](const at::Tensor& tensor) {
      addresses.push_back(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()));
    };
    c10::SmallVector<const at::Tensor*, 16> given;
    for (const c10::IValue& value : arguments) {
      if (!value.isTensor()) continue;
      given.push_back(&value.toTensor());
      add(*given.back());
    }
    auto make = [&](const New& spec) {
      at::Tensor tensor = at::empty(spec.sizes, at::dtype(spec.dtype).device(device));
      add(tensor);
      return tensor;
    };
    std::vector<at::Tensor> outputs, scratch;
    for (const New& spec : plan.outputs) outputs.push_back(make(spec));
    for (const New& spec : plan.scratch) scratch.push_back(make(spec));
    plan.launch_all(addresses.data(), stream);
    for (uint32_t i : plan.written) {
      if (!given[i]->is_inference()) given[i]->unsafeGetTensorImpl()->bump_version();
    }
    return outputs;
  }

  std::vector<at::Tensor> solve(at::ArrayRef<c10::IValue> values, bool record, const Key& key) {
    const py::gil_scoped_acquire gil;
    py::tuple arguments(values.size());
    for (size_t i = 0; i < values.size(); ++i) arguments[i] = to_python(values[i]);
    std::vector<at::Tensor> outputs = outputs_of(call(*table->run, arguments));
    if (!record) return outputs;
    const py::object plan = call(*table->record, arguments);
    if (!plan.is_none()) {
      const std::lock_guard lock(table->mutex);
      table->entries[key].plan = plan.cast<std::shared_ptr<Plan>>();
    }
    return outputs;
  }
};

// Take over an operator's kernel for a dispatch key, for as long as the process lives.
void install(const std::string& name, const std::string& overload, const std::string& key,
             const py::object& run, const py::object& record) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto op = dispatcher.findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto& returns = op.schema().returns();
  const bool list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
  auto* table = new Table{new py::object(run), new py::object(record), list};
  tables().push_back(table);
  auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Replayed>(table));
  // That Python's kernel is there already is as it should be: it says so in a warning.
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  new auto(dispatcher.registerImpl(op.operator_name(), c10::parseDispatchKey(key), kernel,
                                   std::nullopt, nullptr, "jetfire"));
}

void forget() {
  for (Table* table : tables()) {
    const std::lock_guard lock(table->mutex);
    table->entries.clear();
  }
}

uint64_t replayed() {
  uint64_t sum = 0;
  for (Table* table : tables()) {
    const std::lock_guard lock(table->mutex);
    sum += table->replayed;
  }
  return sum;
}

// --- autograd ------------------------------------------------------------------------------------

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A forward operator and its backward (`core.fused`).
struct Pair {
  c10::OperatorHandle forward, backward;
  size_t saved;  // tensors that backward takes after the result's gradient

  static c10::OperatorHandle find(const std::string& name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(("jetfire::" + name).c_str(), "");
  }
};

struct Call {
  const Pair* pair;
  variable_list tensors, kept;
  std::vector<c10::IValue> constants;
};

c10::IValue or_none(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

// The gradient of a gradient fails, with torch's own words for a Python function of this kind
// (`core.once`). That of the result leads here too, for those who ask for it alone.
struct Once : torch::autograd::Function<Once> {
  static at::Tensor forward(AutogradContext*, const at::Tensor& gradient, const at::Tensor&) {
    return gradient.alias();
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false, "trying to differentiate twice a function that was marked with "
                       "@once_differentiable");
  }
};

constexpr size_t MOST_LEAVES = 3;
using Leaf = std::optional<at::Tensor>;

struct PairFunction : torch::autograd::Function<PairFunction> {
  static at::Tensor forward(AutogradContext* ctx, const Leaf& first, const Leaf& second,
                            const Leaf& third, const Call* call) {
    torch::jit::Stack stack;
    for (const at::Tensor& tensor : call->tensors) stack.push_back(or_none(tensor));
    stack.insert(stack.end(), call->constants.begin(), call->constants.end());
    call->pair->forward.callBoxed(&stack);
    variable_list made = torch::jit::pop(stack).toTensorVector();
    at::Tensor result = std::move(made[0]);
    variable_list saved = call->kept;
    saved.insert(saved.end(), made.begin() + 1, made.end());
    saved.resize(call->pair->saved);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["constants"] = c10::ivalue::Tuple::create(call->constants);
    ctx->saved_data["pair"] = reinterpret_cast<int64_t>(call->pair);
    // Torch counts the tensors alone where it says whose gradient is wanted.
    int64_t present = 0;
    for (const Leaf* leaf : {&first, &second, &third}) present = 2 * present + leaf->has_value();
    ctx->saved_data["present"] = present;
    ctx->set_materialize_grads(false);
    return result;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list wanted(MOST_LEAVES + 1);
    if (!grads[0].defined()) return wanted;
    const auto* pair = reinterpret_cast<const Pair*>(ctx->saved_data["pair"].toInt());
    const auto constants = ctx->saved_data["constants"].toTuple();
    const size_t leaves =
        pair->backward.schema().arguments().size() - 1 - pair->saved - constants->elements().size();
    const int64_t present = ctx->saved_data["present"].toInt();
    std::array<bool, MOST_LEAVES> needed{};
    for (size_t i = 0, edge = 0; i < MOST_LEAVES; ++i) {
      if (present >> (MOST_LEAVES - 1 - i) & 1) needed[i] = ctx->needs_input_grad(edge++);
    }
    torch::jit::Stack stack;
    {
      const at::NoGradGuard no_grad;
      torch::jit::push(stack, grads[0].contiguous());
      for (const at::Tensor& tensor : ctx->get_saved_variables()) stack.push_back(or_none(tensor));
      for (const c10::IValue& constant : constants->elements()) stack.push_back(constant);
      for (size_t i = 0; i < leaves; ++i) torch::jit::push(stack, needed[i]);
      pair->backward.callBoxed(&stack);
    }
    auto found = torch::jit::pop(stack).toTensorVector();
    auto next = found.begin();
    for (size_t i = 0; i < leaves; ++i) {
      if (!needed[i]) continue;
      at::Tensor gradient = std::move(*next++);
      if (at::GradMode::is_enabled()) gradient = Once::apply(gradient.requires_grad_(), grads[0]);
      wanted[i] = std::move(gradient);
    }
    return wanted;
  }
};

c10::IValue to_constant(py::handle value) {
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  return value.cast<std::string>();
}

variable_list to_tensors(const py::sequence& values) {
  variable_list tensors;
  tensors.reserve(values.size());
  for (py::handle value : values) {
    tensors.push_back(value.is_none() ? at::Tensor() : THPVariable_Unpack(value.ptr()));
  }
  return tensors;
}

// A tensor's twin `bytes` further on, to be looked at and not read: nothing says what is there.
at::Tensor shifted(const at::Tensor& tensor, int64_t bytes) {
  char* place = static_cast<char*>(tensor.data_ptr()) + bytes;
  return at::for_blob(place, tensor.sizes())
      .strides(tensor.strides())
      .target_device(tensor.device())
      .options(at::dtype(tensor.scalar_type()).device(tensor.device()))
      .make_tensor();
}

at::ScalarType dtype_of(const py::object& tensor) {
  return THPVariable_Unpack(tensor.ptr()).scalar_type();
}

std::vector<New> specs(const std::vector<py::object>& tensors) {
  std::vector<New> made;
  for (const py::object& tensor : tensors) {
    made.push_back({THPVariable_Unpack(tensor.ptr()).sizes().vec(), dtype_of(tensor)});
  }
  return made;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Launch>(m, "Launch")
      .def(py::init([](uint64_t function, std::array<unsigned, 3> grid,
                       std::array<unsigned, 3> block, std::array<unsigned, 3> cluster,
                       unsigned shared_bytes, bool cooperative, bool beside,
                       std::vector<uint32_t> starts, const py::bytes& bytes,
                       const std::vector<std::tuple<uint32_t, uint32_t, int64_t>>& patches) {
        Launch launch{function,    grid,   block,  cluster, shared_bytes,
                      cooperative, beside, starts, bytes,   {}};
        for (const auto& [at, tensor, offset] : patches) {
          launch.patches.push_back({at, tensor, offset});
        }
        return launch;
      }),
           py::arg("function"), py::arg("grid"), py::arg("block"), py::arg("cluster"),
           py::arg("shared_bytes"), py::arg("cooperative"), py::arg("beside"), py::arg("starts"),
           py::arg("parameters"), py::arg("patches"));
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def(py::init([](const std::vector<Launch>& launches, const std::vector<py::object>& outputs,
                       const std::vector<py::object>& scratch, std::vector<uint32_t> written) {
        return std::make_shared<Plan>(Plan{launches, specs(outputs), specs(scratch), written});
      }));
  py::class_<Pair, std::shared_ptr<Pair>>(m, "Pair")
      .def(py::init([](const std::string& forward, const std::string& backward, size_t saved) {
        // Nodes of autograd refer to it for as long as they like.
        static auto* kept = new std::vector<std::shared_ptr<Pair>>;
        Pair pair{Pair::find(forward), Pair::find(backward), saved};
        return kept->emplace_back(std::make_shared<Pair>(pair));
      }))
      .def("__call__", [](const std::shared_ptr<Pair>& pair, const py::sequence& leaves,
                          const py::sequence& tensors, const py::sequence& kept,
                          const py::sequence& constants) {
        std::vector<c10::IValue> values;
        for (py::handle value : constants) values.push_back(to_constant(value));
        const variable_list given = to_tensors(leaves);
        TORCH_CHECK(given.size() <= MOST_LEAVES, given.size(), " leaves");
        std::array<Leaf, MOST_LEAVES> leaf;
        for (size_t i = 0; i < given.size(); ++i) {
          if (given[i].defined()) leaf[i] = given[i];
        }
        const Call call{pair.get(), to_tensors(tensors), to_tensors(kept), std::move(values)};
        at::Tensor result;
        {
          const py::gil_scoped_release none;
          result = PairFunction::apply(leaf[0], leaf[1], leaf[2], &call);
        }
        return py::reinterpret_steal<py::object>(THPVariable_Wrap(result));
      });
  m.def("connect", &connect);
  m.def("install", &install);
  m.def("forget", &forget);
  m.def("replayed", &replayed);
  m.def("shifted", [](const py::object& tensor, int64_t bytes) {
    return py::reinterpret_steal<py::object>(
        THPVariable_Wrap(shifted(THPVariable_Unpack(tensor.ptr()), bytes)));
  });
}
