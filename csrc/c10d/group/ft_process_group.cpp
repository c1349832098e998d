#include "c10d/group/ft_process_group.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

namespace torchft_ext {

FtProcessGroup::FtProcessGroup(const c10::intrusive_ptr<c10d::Store>& store,
                               c10::intrusive_ptr<FtBackend> backend,
                               const std::vector<c10::DeviceType>& devices)
    : WithSplitGroup(store, backend->currentRank(), backend->currentSize()),
      backend_(std::move(backend)),
      devices_(devices) {
  for (const c10::DeviceType device : devices) setBackend(device, BackendType::CUSTOM, backend_);
  setDefaultBackend(BackendType::CUSTOM);
}

void FtProcessGroup::note(CompileQuestions::Of of, int number) const {
  const c10::weak_intrusive_ptr<FtBackend> weak(backend_);
  CompileQuestions::note(of, number, [weak, of]() -> std::optional<int> {
    const auto backend = weak.lock();
    if (!backend) return std::nullopt;
    return of == CompileQuestions::Of::kRank ? backend->currentRank() : backend->currentSize();
  });
}

ProcessGroupPtr FtProcessGroup::splitOff(const std::vector<int>& ranks, const Timeout& timeout,
                                         const BackendOptions& options,
                                         const std::optional<std::string>& name,
                                         const std::optional<std::string>& description,
                                         const std::optional<std::vector<c10::Device>>& devices) {
  std::vector<c10::DeviceType> types = devices_;
  if (devices) {
    types.clear();
    for (const c10::Device& device : *devices) {
      TORCH_CHECK_VALUE(
          std::find(devices_.begin(), devices_.end(), device.type()) != devices_.end(),
          "split_group: device_types: expected devices that the group serves, found ",
          device.str());
      types.push_back(device.type());
    }
  }
  const auto childs = backend_->optionsOfChild(options.value_or(nullptr));
  childs->group_name = name.value_or("");
  if (timeout) childs->timeout = *timeout;
  auto child = backend_->splitOff(getStore(), ranks, childs, true);
  if (!child) return {};
  // Not the child's own where it is the second try of a split that failed under another name.
  const std::string child_name = name.value_or(child->groupName());
  auto store = c10::make_intrusive<c10d::PrefixStore>(child_name + "/", getStore());
  auto group = c10::make_intrusive<FtProcessGroup>(store, std::move(child), types);
  group->setGroupName(child_name);
  group->setGroupDesc(description.value_or(getGroupDesc() + ":split"));
  return group;
}

}  // namespace torchft_ext
