// A compiled program, called many times: what it returns goes back in, and what is to be kept is put side by side.
// See cpu_loop.py.

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

// Where an output of each call goes: `pieces` pieces of `bytes` each, `piece_stride` apart, and `step_stride` further
// for each call.
struct Stack {
  char* to;
  int64_t output, pieces, bytes, piece_stride, step_stride;
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

// Outputs that are one tensor come as one handle: gives each its own.
void part(int64_t num_outputs, AtenTensorHandle* outputs) {
  std::vector<int64_t> twin(num_outputs, -1);
  for (int64_t i = 0; i < num_outputs; i++)
    for (int64_t j = 0; j < i && twin[i] < 0; j++)
      if (outputs[i] == outputs[j]) twin[i] = j;
  for (int64_t i = 0; i < num_outputs; i++)
    if (twin[i] >= 0) outputs[i] = nullptr;
  for (int64_t i = 0; i < num_outputs; i++)
    if (twin[i] >= 0) outputs[i] = another(outputs[twin[i]]);
}

void copy(const Stack& stack, AtenTensorHandle output, int64_t step) {
  void* data;
  if (aoti_torch_get_data_ptr(output, &data)) throw std::runtime_error("an output has no data");
  const char* from = static_cast<const char*>(data);
  char* to = stack.to + step * stack.step_stride;
  for (int64_t piece = 0; piece < stack.pieces; piece++)
    std::memcpy(to + piece * stack.piece_stride, from + piece * stack.bytes, stack.bytes);
}

std::string message;

}  // namespace

// Calls `program` `length` times. `inputs` are the caller's; input i of a later call is output `source[i]` of the call
// before, or, if that is negative, input i again. Afterwards `outputs` holds those of the last call, which are the
// caller's to free. Returns nullptr, or what went wrong.
extern "C" const char* torchpod_loop(Program program, int64_t length, int64_t num_inputs, const AtenTensorHandle* inputs,
                                     const int64_t* source, int64_t num_outputs, AtenTensorHandle* outputs,
                                     int64_t num_stacks, const Stack* stacks) {
  std::vector<AtenTensorHandle> given(num_inputs);
  try {
    for (int64_t step = 0; step < length; step++) {
      for (int64_t i = 0; i < num_inputs; i++) {
        if (step == 0 || source[i] < 0) {
          given[i] = another(inputs[i]);
        } else {
          given[i] = outputs[source[i]];
          outputs[source[i]] = nullptr;
        }
      }
      for (int64_t i = 0; i < num_outputs; i++) drop(outputs[i]);
      program(given.data(), outputs);
      part(num_outputs, outputs);
      for (int64_t i = 0; i < num_stacks; i++) copy(stacks[i], outputs[stacks[i].output], step);
    }
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
    message = "unknown error";
  }
  for (int64_t i = 0; i < num_outputs; i++) drop(outputs[i]);
  return message.c_str();
}
