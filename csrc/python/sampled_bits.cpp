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

// Of all indices, in bytes.
uint64_t bytesSpannedBy(const at::Tensor& tensor) {
  uint64_t last = static_cast<uint64_t>(tensor.storage_offset());
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += static_cast<uint64_t>((tensor.size(dim) - 1) * tensor.stride(dim));
  }
  return (last + 1) * tensor.element_size();
}

// Wrappers (FakeTensor, results that are under way) have no memory, or other than they say.
bool hasMemory(const at::Tensor& tensor) {
  return tensor.has_storage() && !tensor.key_set().has(c10::DispatchKey::Python) &&
         tensor.storage().data() != nullptr && bytesSpannedBy(tensor) <= tensor.storage().nbytes();
}

bool hasOrderedElements(const at::Tensor& tensor) {
  return tensor.numel() > 0 && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor.is_meta() && hasMemory(tensor);
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
  const at::Tensor places = at::arange(begin, begin + length, tensor.options().dtype(at::kLong));
  addElements(hash, at::take(tensor.detach(), places).cpu(), 0, length);
}

uint64_t hashOf(const at::Tensor& tensor, uint64_t seed, bool with_values) {
  Hash hash;
  hash.add(static_cast<uint64_t>(tensor.scalar_type()));
  for (const int64_t size : tensor.sizes()) hash.add(static_cast<uint64_t>(size));
  if (with_values && hasOrderedElements(tensor)) {
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
  const py::gil_scoped_release no_gil;  // a device may be waited for
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
