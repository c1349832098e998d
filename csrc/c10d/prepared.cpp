#include "c10d/prepared.h"

namespace torchft_ext {

at::Tensor Prepared::writableFor(const at::Tensor& tensor, bool read) {
  tensors.push_back(tensor);
  if (tensor.is_contiguous()) return tensor;
  const at::Tensor plain = tensor.variable_data();  // as it lies in memory, without its history
  at::Tensor contiguous = read ? plain.contiguous() : at::empty(plain.sizes(), plain.options());
  tensors.push_back(contiguous);
  landings.push_back({contiguous, plain});
  return contiguous;
}

std::vector<at::Tensor> Prepared::writableFor(const std::vector<at::Tensor>& overwritten) {
  std::vector<at::Tensor> written;
  written.reserve(overwritten.size());
  for (const at::Tensor& tensor : overwritten) written.push_back(writableFor(tensor, false));
  return written;
}

}  // namespace torchft_ext
