#include "c10d/adapter/prepared.h"

#include <algorithm>

#include "c10d/adapter/arguments.h"
#include "comm/callbacks.h"

namespace torchft_ext {
namespace {

bool overlap(const Buffer& a, const Buffer& b) {
  return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
}

}  // namespace

at::Tensor Prepared::contiguousCopy(const at::Tensor& tensor, bool loaded, bool stored) {
  const at::Tensor plain = tensor.variable_data();  // as it lies in memory, without its history
  const ContiguousCopy contiguous_copy{at::empty(plain.sizes(), plain.options()), plain};
  kept.push_back(contiguous_copy.contiguous);
  if (loaded) loads.push_back(contiguous_copy);
  if (stored) {
    plain.mutable_data_ptr();  // a copy-on-write tensor gets memory of its own, now
    stores.push_back(contiguous_copy);
  }
  return contiguous_copy.contiguous;
}

at::Tensor Prepared::writableFor(const at::Tensor& tensor, Use use) {
  tensors.push_back(tensor);
  if (tensor.is_contiguous()) return tensor;
  // Device memory is stored whatever becomes of the operation: where nothing came, what was there.
  const bool loaded = use != Use::kWritten || !tensor.is_cpu();
  return contiguousCopy(tensor, loaded, use != Use::kRead);
}

std::vector<at::Tensor> Prepared::writableFor(const std::vector<at::Tensor>& overwritten) {
  std::vector<at::Tensor> written;
  written.reserve(overwritten.size());
  for (const at::Tensor& tensor : overwritten)
    written.push_back(writableFor(tensor, Use::kWritten));
  return written;
}

at::Tensor Prepared::readableFor(const at::Tensor& tensor, const std::vector<at::Tensor>& written,
                                 const void* in_place) {
  tensors.push_back(tensor);
  const bool apart = std::none_of(
      written.begin(), written.end(),
      [&tensor](const at::Tensor& output) { return overlap(readable(tensor), readable(output)); });
  const bool usable = apart || (in_place != nullptr && tensor.const_data_ptr() == in_place);
  if (tensor.is_contiguous() && usable) return tensor;
  return contiguousCopy(tensor, /*loaded=*/true, /*stored=*/false);
}

const std::vector<Buffer>& Prepared::reads() const {
  const bool in_place = operation.kind == OpKind::kAllreduce ||
                        (operation.kind == OpKind::kBroadcast && rank == operation.root);
  return in_place ? operation.outputs : operation.inputs;
}

void releaseElsewhere(std::vector<at::Tensor> tensors) {
  const bool shared = std::all_of(tensors.begin(), tensors.end(),
                                  [](const at::Tensor& tensor) { return tensor.use_count() > 1; });
  if (!shared) runOnCallbackThread([owners = std::move(tensors)] {});
}

}  // namespace torchft_ext
