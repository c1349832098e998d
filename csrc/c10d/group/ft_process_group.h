// The group object that users hold when "ft" is its only backend: rank and size follow the
// generation, which torch's own class fixes at construction (before 2.14).
//
// Owner: torch's tables and the user. Threads: any. After abort or destruction: as its one backend.
// It never blocks by itself.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "c10d/group/ft_backend.h"
#include "c10d/work/compile_questions.h"

namespace torchft_ext {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// Overrides splitGroup(), which takes one argument more since torch 2.13.
template <typename Method>
class WithSplitGroup;

template <typename... Arguments>
class WithSplitGroup<ProcessGroupPtr (c10d::ProcessGroup::*)(Arguments...)>
    : public c10d::ProcessGroup {
 public:
  using c10d::ProcessGroup::ProcessGroup;
  ProcessGroupPtr splitGroup(Arguments... arguments) final { return splitOff(arguments...); }

 protected:
  using Timeout = std::optional<std::chrono::milliseconds>;
  using BackendOptions = std::optional<c10::intrusive_ptr<c10d::Backend::Options>>;
  // devices: those that the new group serves; nullopt: all that this one does.
  virtual ProcessGroupPtr splitOff(
      const std::vector<int>& ranks, const Timeout& timeout, const BackendOptions& options,
      const std::optional<std::string>& name, const std::optional<std::string>& description,
      const std::optional<std::vector<c10::Device>>& devices = std::nullopt) = 0;
};

class FtProcessGroup : public WithSplitGroup<decltype(&c10d::ProcessGroup::splitGroup)> {
 public:
  // Serves every device type by this backend.
  FtProcessGroup(const c10::intrusive_ptr<c10d::Store>& store,
                 c10::intrusive_ptr<FtBackend> backend,
                 const std::vector<c10::DeviceType>& devices);

  const c10::intrusive_ptr<FtBackend>& backend() const { return backend_; }
  int getRank() const override {
    return answered(CompileQuestions::Of::kRank, backend_->currentRank());
  }
  int getSize() const override {
    return answered(CompileQuestions::Of::kSize, backend_->currentSize());
  }
  const std::string getBackendName() const override { return backend_->getBackendName(); }

 private:
  int answered(CompileQuestions::Of of, int number) const {
    if (CompileQuestions::wanted()) note(of, number);
    return number;
  }
  void note(CompileQuestions::Of of, int number) const;
  // See FtBackend::split(): null for who is not among the ranks.
  ProcessGroupPtr splitOff(const std::vector<int>& ranks, const Timeout& timeout,
                           const BackendOptions& options, const std::optional<std::string>& name,
                           const std::optional<std::string>& description,
                           const std::optional<std::vector<c10::Device>>& devices) override;

  const c10::intrusive_ptr<FtBackend> backend_;
  const std::vector<c10::DeviceType> devices_;
};

}  // namespace torchft_ext
