// What the bindings of products of rows by a weight share, whatever the weight's format: x [..., depth], the weight
// with a row for each output, perhaps a bias [rows of the weight], and y [..., width]. With SwiGLU the weight has the
// gate's rows and as many of the up projection. Knows no kernel.
#pragma once

#include "../cuda_binding.h"

namespace kiln::ort {

// `x`, the weight and the bias of a call, of the right ranks; the bias, which is absent or the last input, as long as
// the weight has rows. `columns` is what a row of the weight has, for messages.
struct ProductOperands {
  Tensor x, weight, bias;

  ProductOperands(OrtApi api, OrtKernelContext* context, size_t bias_index, const char* columns) {
    size_t given = 0;
    require(api, KernelContextGetInputCount::of(api)(context, &given));
    x = input_tensor(api, context, 0);
    weight = input_tensor(api, context, 1);
    if (given > bias_index) bias = input_tensor(api, context, bias_index);
    if (x.shape.empty()) fail("x has the wrong rank: found [], expected [..., depth]");
    if (weight.shape.size() != 2)
      fail("weight has the wrong rank: found ", text(weight.shape), ", expected [width, ", columns, "]");
    if (bias.present) expect_shape(bias, "bias", {weight.shape[0]});
  }

  int64_t depth() const { return x.shape.back(); }
  int64_t weight_rows() const { return weight.shape[0]; }

  // Sizes and pointers of a call, whose fields have these names, and the memory of its result.
  template <typename Call>
  void fill(Call& call, OrtApi api, OrtKernelContext* context, bool swiglu, cuda::Element element) const {
    if (swiglu && weight_rows() % 2)
      fail("weight must have the gate's and as many rows of the up projection: found ", weight_rows(), " rows");
    call.rows = elements(with_last(x.shape, 1));
    call.depth = depth();
    call.width = swiglu ? weight_rows() / 2 : weight_rows();
    call.swiglu = swiglu;
    call.element = element;
    call.x = x.data;
    call.weight = weight.data;
    call.bias = bias.data;
    call.y = output_data(api, context, 0, with_last(x.shape, call.width));
  }
};

}  // namespace kiln::ort
