// The public headers for programs on libtorch, with the simulated device; ranks as processes:
// ddp_rank/.
#include <gtest/gtest.h>

#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "cpp/libtorch/store_server.h"
#include "cpp/support/processes.h"
#include "libtorch/group_backend.h"
#include "sim.h"
#include "torchft_ext/torch/process_group.h"

namespace torchft_ext {
namespace {

// In place of this process's NCCL.
struct Simulated {
  Simulated() { setNcclPlatformForTest(sim::platform()); }
  ~Simulated() { setNcclPlatformForTest(nullptr); }
};

c10::Device firstDevice() {
  return {c10::DeviceType::PrivateUse1, 0};
}

ProcessGroupPtr onDevices(std::optional<c10::Device> device) {
  return makeGroup(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                   {.engine = "nccl", .device = device});
}

TEST(LibtorchOnDevices, ABoundGroupHoldsItsBarriersOnItsDevice) {
  const Simulated simulated;
  const ProcessGroupPtr unbound = onDevices(std::nullopt);
  EXPECT_THROW(backendIn(unbound)->barrier({}), c10::ValueError);
  const ProcessGroupPtr bound = onDevices(firstDevice());
  EXPECT_EQ(bound->getBoundDeviceId(), firstDevice());
  backendIn(bound)->barrier({})->wait();
  check(bound);
  for (const ProcessGroupPtr& group : {unbound, bound}) shutdown(group);
}

TEST(LibtorchOnDevices, ATensorOfAnotherDeviceIsRefusedWithWhatToUse) {
  const Simulated simulated;
  const ProcessGroupPtr group = onDevices(firstDevice());
  std::vector<at::Tensor> tensors{at::ones({3})};
  EXPECT_THROW(group->allreduce(tensors), c10::Error);  // torch's own: it finds no backend
  try {
    backendIn(group)->allreduce(tensors, {});
    ADD_FAILURE() << "a CPU tensor was taken";
  } catch (const c10::NotImplementedError& error) {
    EXPECT_EQ(std::string(error.what_without_backtrace()),
              "allreduce: tensors: this group serves PRIVATEUSEONE tensors only, found CPU "
              "tensors: use the backend 'ft' for both, or a spec that has one for each, "
              "'cpu:...,privateuseone:...'");
  }
  tensors = {at::ones({3}, firstDevice())};
  group->allreduce(tensors)->wait();
  check(group);  // nothing has come of it
  EXPECT_TRUE(tensors[0].cpu().equal(at::ones({3})));
  shutdown(group);
}

TEST(LibtorchOnDevices, DdpsGradientsAreTheMeanWhileMembersDieAndComeAndAnOldBackwardThrows) {
  const Meeting meeting;
  Processes survivors;
  Processes victim;
  for (const char* number : {"0", "1", "2", "3"}) {
    (*number == '2' ? victim : survivors)
        .start({TFT_DDP_RANK, "members", meeting.port(), number, TFT_SIM_LIBRARY});
  }
  EXPECT_TRUE(survivors.endWell(Deadline::after(std::chrono::seconds(180))));
}

}  // namespace
}  // namespace torchft_ext
