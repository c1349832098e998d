#include "nccl/succession.h"

#include <optional>
#include <utility>

namespace torchft_ext {

Succession::Succession(NcclThreads& threads, const DeviceComm& comm) : threads_(threads) {
  const auto& lineage = comm.setup().lineage;
  if (!lineage) return;
  parent_ = threads_.heritage->claim(lineage->heir, comm.setup().device);
  if (!parent_) return;
  auto excluded = leftOut(parent_->setup().lineage->members, lineage->members);
  if (excluded) {
    excluded_ = std::move(*excluded);
  } else {
    unfit_ = decline();
  }
}

bool Succession::decline() {
  if (!parent_) return std::exchange(unfit_, false);
  threads_.reaper.abort({std::exchange(parent_, nullptr)});
  return true;
}

bool Succession::bringUp(DeviceComm& comm, Bootstrap bootstrap) {
  if (!comm.initialiseFrom(parent_, excluded_, bootstrap.deadline)) return false;
  bootstrap.round = Bootstrap::Round::kVote;
  if (!meet(bootstrap)) return false;
  auto parent = comm.comeOfAge(bootstrap.deadline);
  if (!parent) return false;
  threads_.heritage->countInherited();
  threads_.reaper.abort({std::move(parent)});
  return true;
}

}  // namespace torchft_ext
