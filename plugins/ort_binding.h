// What every operator's binding to ONNX Runtime needs: failures as statuses, tensors, attributes, threads, defaults.
// Knows no operator.
#pragma once

#include <exception>
#include <sstream>
#include <string>
#include <vector>

#include "ort_abi.h"
#include "parallel.h"

namespace kiln::ort {

struct Failure {
  std::string message;
};

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  throw Failure{out.str()};
}

inline void require(OrtApi api, OrtStatus* status) {
  if (!status) return;
  std::string message = GetErrorMessage::of(api)(status);
  ReleaseStatus::of(api)(status);
  throw Failure{message};
}

// Runs body and turns what it throws into a status that names the operator: no exception may cross the C boundary.
template <typename Body>
OrtStatus* guarded(OrtApi api, const char* name, Body body) {
  try {
    body();
    return nullptr;
  } catch (const Failure& failure) {
    return CreateStatus::of(api)(kInvalidArgument, ("kiln::" + std::string(name) + ": " + failure.message).c_str());
  } catch (const std::exception& error) {
    return CreateStatus::of(api)(kFail, ("kiln::" + std::string(name) + ": " + error.what()).c_str());
  }
}

struct Tensor {
  void* data = nullptr;
  std::vector<int64_t> shape;
  bool present = false;
};

inline std::string text(const std::vector<int64_t>& shape) {
  std::ostringstream out;
  out << '[';
  for (size_t i = 0; i < shape.size(); i++) out << (i ? ", " : "") << shape[i];
  out << ']';
  return out.str();
}

inline int64_t elements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

inline std::vector<int64_t> with_last(std::vector<int64_t> shape, int64_t last) {
  shape.back() = last;
  return shape;
}

inline Tensor input_tensor(OrtApi api, OrtKernelContext* context, size_t index) {
  const OrtValue* value = nullptr;
  require(api, KernelContextGetInput::of(api)(context, index, &value));
  Tensor tensor;
  if (!value) return tensor;
  tensor.present = true;
  require(api, GetTensorMutableData::of(api)(const_cast<OrtValue*>(value), &tensor.data));
  OrtTensorTypeAndShapeInfo* info = nullptr;
  require(api, GetTensorTypeAndShape::of(api)(value, &info));
  size_t rank = 0;
  OrtStatus* status = GetDimensionsCount::of(api)(info, &rank);
  tensor.shape.resize(rank);
  if (!status) status = GetDimensions::of(api)(info, tensor.shape.data(), rank);
  ReleaseTensorTypeAndShapeInfo::of(api)(info);
  require(api, status);
  return tensor;
}

// Null for an optional output that nobody reads.
inline void* output_data(OrtApi api, OrtKernelContext* context, size_t index, const std::vector<int64_t>& shape) {
  OrtValue* value = nullptr;
  require(api, KernelContextGetOutput::of(api)(context, index, shape.data(), shape.size(), &value));
  void* data = nullptr;
  if (value) require(api, GetTensorMutableData::of(api)(value, &data));
  return data;
}

inline void expect_shape(const Tensor& tensor, const char* name, const std::vector<int64_t>& expected) {
  if (tensor.shape != expected)
    fail(name, " has the wrong shape: found ", text(tensor.shape), ", expected ", text(expected));
}

template <typename Getter, typename T>
bool has_attribute(OrtApi api, const OrtKernelInfo* info, const char* name, T* value) {
  OrtStatus* status = Getter::of(api)(info, name, value);
  if (status) ReleaseStatus::of(api)(status);
  return !status;
}

// A missing attribute has its default; one of the other type is an error, not a default.
inline int64_t attribute(OrtApi api, const OrtKernelInfo* info, const char* name, int64_t otherwise) {
  int64_t value;
  float wrong;
  if (has_attribute<KernelInfoGetAttributeInt64>(api, info, name, &value)) return value;
  if (has_attribute<KernelInfoGetAttributeFloat>(api, info, name, &wrong))
    fail("attribute ", name, " must be an integer: found the float ", wrong);
  return otherwise;
}

inline float attribute(OrtApi api, const OrtKernelInfo* info, const char* name, float otherwise) {
  float value;
  int64_t wrong;
  if (has_attribute<KernelInfoGetAttributeFloat>(api, info, name, &value)) return value;
  if (has_attribute<KernelInfoGetAttributeInt64>(api, info, name, &wrong))
    fail("attribute ", name, " must be a float: found the integer ", wrong);
  return otherwise;
}

inline std::string attribute(OrtApi api, const OrtKernelInfo* info, const char* name, const std::string& otherwise) {
  int64_t wrong;
  size_t size = 0;  // with the zero at the end
  if (has_attribute<KernelInfoGetAttributeInt64>(api, info, name, &wrong))
    fail("attribute ", name, " must be a text: found the integer ", wrong);
  OrtStatus* status = KernelInfoGetAttributeString::of(api)(info, name, nullptr, &size);
  if (status) ReleaseStatus::of(api)(status);
  if (status || size == 0) return otherwise;
  std::string value(size, '\0');
  require(api, KernelInfoGetAttributeString::of(api)(info, name, value.data(), &size));
  value.resize(size - 1);
  return value;
}

// The thread pool of the session that runs the kernel.
class Pool final : public Parallel {
 public:
  Pool(OrtApi api, OrtKernelContext* context) : api_(api), context_(context) {}
  void run(size_t total, void (*body)(void*, size_t), void* user) override {
    require(api_, KernelContextParallelFor::of(api_)(context_, body, total, 0, user));
  }

 private:
  OrtApi api_;
  OrtKernelContext* context_;
};

// The fields that all operators fill alike: on the CPU, every operand required and none variadic, any version from 1 on.
// An operator adds its operands and CreateKernelV2. `Kernel` has kName, api and compute(context).
template <typename Kernel>
void fill_common(OrtCustomOp& op) {
  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp*) { return Kernel::kName; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return kRequired; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const Kernel& k = *static_cast<const Kernel*>(kernel);
    return guarded(k.api, Kernel::kName, [&] { k.compute(context); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
}

}  // namespace kiln::ort
