#include "staged/staged_engine.h"

#include <utility>
#include <variant>

#include "staged/staged_communicator.h"
#include "staged/staging_thread.h"

namespace torchft_ext {
namespace {

class StagedEngine : public Engine {
 public:
  StagedEngine(std::shared_ptr<Engine> host, std::shared_ptr<const DevicePlatform> platform)
      : host_(std::move(host)), platform_(std::move(platform)) {}

  const char* name() const override { return host_->name(); }
  std::variant<std::shared_ptr<Engine>, Failure> forMember(int member) override;
  std::vector<std::pair<std::string, int64_t>> counters() const override;
  std::variant<MemberRecord, Failure> describeSelf() override { return host_->describeSelf(); }
  std::unique_ptr<MemberProber> makeMemberProber(int size) override {
    return host_->makeMemberProber(size);
  }
  Duration frozenAfter() const override { return host_->frozenAfter(); }
  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override;

 private:
  const std::shared_ptr<Engine> host_;
  const std::shared_ptr<const DevicePlatform> platform_;
};

std::variant<std::shared_ptr<Engine>, Failure> StagedEngine::forMember(int member) {
  auto made = host_->forMember(member);
  auto* host = std::get_if<std::shared_ptr<Engine>>(&made);
  if (host == nullptr || !*host) return made;
  return std::shared_ptr<Engine>(std::make_shared<StagedEngine>(std::move(*host), platform_));
}

std::vector<std::pair<std::string, int64_t>> StagedEngine::counters() const {
  auto counters = host_->counters();
  const StagingCounts staged = StagingThread::counts();
  counters.emplace_back("staged_operations", staged.operations);
  counters.emplace_back("staged_pending", staged.pending);
  counters.emplace_back("staged_bytes_loaded", staged.bytes_loaded);
  counters.emplace_back("staged_bytes_stored", staged.bytes_stored);
  return counters;
}

std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> StagedEngine::form(
    const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
    const std::function<bool()>& superseded) {
  auto formed = host_->form(roster, lifecycle, deadline, superseded);
  auto* host = std::get_if<std::shared_ptr<Communicator>>(&formed);
  if (host == nullptr) return formed;
  return std::shared_ptr<Communicator>(
      std::make_shared<StagedCommunicator>(std::move(*host), std::move(lifecycle), platform_));
}

}  // namespace

std::shared_ptr<Engine> makeStagedEngine(std::shared_ptr<Engine> host,
                                         std::shared_ptr<const DevicePlatform> platform) {
  return std::make_shared<StagedEngine>(std::move(host), std::move(platform));
}

bool stopStagedEngines(Deadline deadline) {
  return StagingThread::stop(deadline);
}

}  // namespace torchft_ext
