// Many calls of compiled programs, one after the other: what one returns goes into the next, and what is to be kept of
// each is put side by side. See cpu_calls.py.

#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Inductor's entry point: takes over the inputs, gives away the outputs. Python's lock is held when it is called.
typedef void (*Program)(AtenTensorHandle* inputs, AtenTensorHandle* outputs);

// A call, with numbers of tensors. Input ~i is tensor i, which nobody needs afterwards. Without a program, a view of its
// input: offset, sizes, strides.
struct Call {
  Program program;
  int64_t num_inputs;
  const int64_t* inputs;
  int64_t num_outputs;
  const int64_t* outputs;
  int64_t num_axes;
  const int64_t* view;
};

// Where an output of each call goes: `pieces` pieces of `bytes` each, `piece_stride` apart, and `call_stride` further
// for each call. Before that of the first call goes argument `first`, if it is not negative.
struct Stack {
  char* to;
  int64_t output, first, pieces, bytes, piece_stride, call_stride;
};

AtenTensorHandle another(AtenTensorHandle tensor) {
  AtenTensorHandle made;
  if (aoti_torch_new_tensor_handle(tensor, &made)) throw std::runtime_error("a tensor has no second handle");
  return made;
}

void drop(AtenTensorHandle& tensor) {
  if (tensor) aoti_torch_delete_tensor_object(tensor);
  tensor = nullptr;
}

AtenTensorHandle view_of(AtenTensorHandle tensor, const Call& call) {
  AtenTensorHandle made;
  const int64_t *sizes = call.view + 1, *strides = sizes + call.num_axes;
  if (aoti_torch__reinterpret_tensor(tensor, call.num_axes, sizes, strides, call.view[0], &made))
    throw std::runtime_error("a tensor has no such view");
  return made;
}

// Outputs that are one tensor come as one handle: gives each its own.
void part(std::vector<AtenTensorHandle>& outputs) {
  const size_t size = outputs.size();
  std::vector<size_t> twin(size, size);
  for (size_t i = 0; i < size; i++)
    for (size_t j = 0; j < i && twin[i] == size; j++)
      if (outputs[i] == outputs[j]) twin[i] = j;
  for (size_t i = 0; i < size; i++)
    if (twin[i] < size) outputs[i] = nullptr;
  for (size_t i = 0; i < size; i++)
    if (twin[i] < size) outputs[i] = another(outputs[twin[i]]);
}

void copy(const Stack& stack, AtenTensorHandle tensor, int64_t call) {
  void* data;
  if (aoti_torch_get_data_ptr(tensor, &data)) throw std::runtime_error("a tensor to be kept has no data");
  const char* from = static_cast<const char*>(data);
  char* to = stack.to + call * stack.call_stride;
  for (int64_t piece = 0; piece < stack.pieces; piece++)
    std::memcpy(to + piece * stack.piece_stride, from + piece * stack.bytes, stack.bytes);
}

// Tensors by number; those that are left are freed with it.
struct Tensors : std::vector<AtenTensorHandle> {
  using std::vector<AtenTensorHandle>::vector;
  ~Tensors() {
    for (AtenTensorHandle& tensor : *this) drop(tensor);
  }
};

}  // namespace

// Calls on tensors, of which the first are `given`, a list of capsules that are taken over. Returns capsules of those
// with the numbers `results`.
extern "C" PyObject* torchpod_call(int64_t num_tensors, PyObject* given, int64_t num_calls, const Call* calls,
                                   int64_t num_stacks, const Stack* stacks, int64_t num_results, const int64_t* results) {
  Tensors tensors(num_tensors);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); i++)
    tensors[i] = static_cast<AtenTensorHandle>(PyCapsule_GetPointer(PyList_GET_ITEM(given, i), nullptr));
  std::vector<AtenTensorHandle> inputs, outputs;
  try {
    for (int64_t i = 0; i < num_stacks; i++)
      if (stacks[i].first >= 0) copy(stacks[i], tensors[stacks[i].first], -1);
    for (int64_t n = 0; n < num_calls; n++) {
      if (PyErr_CheckSignals()) return nullptr;  // an update may go on for minutes, and Python hears nothing meanwhile
      const Call& call = calls[n];
      inputs.clear();
      for (int64_t i = 0; i < call.num_inputs; i++) {
        const int64_t number = call.inputs[i];
        inputs.push_back(number < 0 ? tensors[~number] : another(tensors[number]));
        if (number < 0) tensors[~number] = nullptr;
      }
      outputs.assign(call.num_outputs, nullptr);
      if (call.program) {
        call.program(inputs.data(), outputs.data());
        part(outputs);
      } else {
        outputs[0] = view_of(inputs[0], call);
        drop(inputs[0]);
      }
      for (int64_t i = 0; i < num_stacks; i++) copy(stacks[i], outputs[stacks[i].output], n);
      for (int64_t i = 0; i < call.num_outputs; i++) {
        drop(tensors[call.outputs[i]]);
        tensors[call.outputs[i]] = outputs[i];
      }
    }
    PyObject* made = PyList_New(num_results);
    for (int64_t i = 0; i < num_results; i++)
      PyList_SET_ITEM(made, i, PyCapsule_New(another(tensors[results[i]]), nullptr, nullptr));
    return made;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "unknown error");
  }
  return nullptr;
}
