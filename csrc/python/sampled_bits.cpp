#include "python/sampled_bits.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace py = pybind11;

namespace torchft_ext {
namespace {

constexpr int64_t kSample = 8;        // neighbours: most of them share a line of the cache
constexpr size_t kMostOnDevices = 4;  // each costs a copy to the host

uint64_t mixed(uint64_t x) {  // splitmix64 (Steele et al., OOPSLA 2014)
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

class Hash {
 public:
  void add(uint64_t word) { state_ = mixed(state_ ^ word); }
  void addBytes(const char* data, size_t size) {
    for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, data + at, std::min(sizeof word, size - at));
      add(word);
    }
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0;
};

bool hasOrderedElements(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor.is_meta() && tensor.has_storage();
}

// Of the element with this index in the order of indices, in elements.
int64_t offsetOf(const at::Tensor& tensor, int64_t index) {
  if (tensor.is_contiguous()) return index;
  int64_t offset = 0;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    const int64_t size = tensor.size(dim);
    offset += index % size * tensor.stride(dim);
    index /= size;
  }
  return offset;
}

void addElements(Hash& hash, const at::Tensor& tensor, int64_t begin, int64_t end) {
  const auto size = tensor.element_size();
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  std::array<char, kSample * 16> bytes{};  // complex128 is the widest
  char* at = bytes.data();
  for (int64_t index = begin; index < end; ++index, at += size) {
    std::memcpy(at, data + offsetOf(tensor, index) * static_cast<int64_t>(size), size);
  }
  hash.addBytes(bytes.data(), static_cast<size_t>(at - bytes.data()));
}

void addSample(Hash& hash, const at::Tensor& tensor, uint64_t where) {
  const int64_t count = tensor.numel();
  const int64_t length = std::min(count, kSample);
  const auto begin = static_cast<int64_t>(where % static_cast<uint64_t>(count - length + 1));
  if (tensor.is_cpu()) return addElements(hash, tensor, begin, begin + length);
  // A view, which only contiguous memory gives without a copy of all of it.
  if (!tensor.is_contiguous()) return;
  const at::Tensor here = tensor.detach().view({-1}).narrow(0, begin, length).cpu();
  addElements(hash, here, 0, length);
}

uint64_t hashOf(const at::Tensor& tensor, uint64_t seed, bool with_values) {
  Hash hash;
  hash.add(static_cast<uint64_t>(tensor.scalar_type()));
  for (const int64_t size : tensor.sizes()) hash.add(static_cast<uint64_t>(size));
  if (with_values && hasOrderedElements(tensor) && tensor.numel() > 0) {
    addSample(hash, tensor, seed);
  }
  return hash.value();
}

// The undefined tensor for None.
std::vector<at::Tensor> tensorsOf(const py::sequence& sequence, bool of_gradients) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(sequence.size());
  for (const py::handle item : sequence) {
    if (item.is_none()) {
      tensors.emplace_back();
      continue;
    }
    if (!THPVariable_Check(item.ptr())) throw py::type_error("expected tensors, or None");
    const at::Tensor& tensor = THPVariable_Unpack(item.ptr());
    tensors.push_back(of_gradients ? tensor.grad() : tensor);
  }
  return tensors;
}

// Which of those on devices are sampled this time: neighbours, at a place that the seed chooses.
std::vector<bool> chosenOnDevices(const std::vector<at::Tensor>& tensors, uint64_t seed) {
  std::vector<size_t> on_devices;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined() && !tensors[i].is_cpu()) on_devices.push_back(i);
  }
  std::vector<bool> chosen(tensors.size());
  const size_t begin = on_devices.empty() ? 0 : mixed(seed) % on_devices.size();
  for (size_t i = 0; i < std::min(kMostOnDevices, on_devices.size()); ++i) {
    chosen[on_devices[(begin + i) % on_devices.size()]] = true;
  }
  return chosen;
}

}  // namespace

std::string sampledBits(const py::sequence& tensors, uint64_t seed, bool of_gradients) {
  const std::vector<at::Tensor> all = tensorsOf(tensors, of_gradients);
  const std::vector<bool> chosen = chosenOnDevices(all, seed);
  std::string hashes(all.size() * sizeof(uint64_t), '\0');
  for (size_t i = 0; i < all.size(); ++i) {
    const at::Tensor& tensor = all[i];
    const uint64_t none = 0;
    const uint64_t hash =
        tensor.defined() ? hashOf(tensor, mixed(seed ^ i), tensor.is_cpu() || chosen[i]) : none;
    std::memcpy(hashes.data() + i * sizeof hash, &hash, sizeof hash);
  }
  return hashes;
}

}  // namespace torchft_ext
