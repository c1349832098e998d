// Engines as groups ask for them by name: c10d serves whatever is registered.
#include "c10d/group/engines.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "c10d/work/comm_error.h"
#include "cpp/comm/around_engine.h"
#include "cpp/support/sanitizer.h"
#include "engines/known_engines.h"
#include "host/process.h"
#include "nccl/nccl_kind.h"
#include "torchft_ext/error.h"

namespace torchft_ext {
namespace {

constexpr auto kToyDevice = c10::DeviceType::PrivateUse1;
std::atomic<bool> toy_is_here{false};
std::atomic<int> nccl_asked{0};  // how often an engine of NCCL was wanted

class ToyPlatform : public DevicePlatform {
 public:
  c10::DeviceType type() const override { return kToyDevice; }
  const char* library() const override { return "the toy"; }
  std::string lacksToReduce(DType) const override { return {}; }
  bool capturing(const c10::Stream&) const override { return false; }
  std::unique_ptr<RelaxedCapture> relaxCapture() const override { return nullptr; }
};

class ToyEngine : public AroundEngine {
 public:
  using AroundEngine::AroundEngine;
  const char* name() const override { return "toy"; }
  std::variant<std::shared_ptr<Communicator>, Failure, std::monostate> form(
      const Roster& roster, std::shared_ptr<Lifecycle> lifecycle, Deadline deadline,
      const std::function<bool()>& superseded) override {
    return inner_->form(roster, std::move(lifecycle), deadline, superseded);
  }
};

class ToyMemory : public PoolRegistry {
 public:
  MemoryOutcome add(MemoryPool /*pool*/, Deadline /*deadline*/) override { return {}; }
  MemoryOutcome remove(const PoolId& /*id*/, Deadline /*deadline*/) override { return {}; }
  bool knows(const PoolId& /*id*/) const override { return false; }
  void close() override {}
};

EngineKind toyKind() {
  EngineKind kind;
  kind.name = "toy";
  kind.library = "a toy";
  kind.for_devices = true;
  kind.make = [](const EngineRequest& request) -> EngineKind::Outcome {
    if (!toy_is_here) return NotHere{"the toy is put away"};
    auto host = request.host();
    if (auto* failure = std::get_if<Failure>(&host)) return std::move(*failure);
    MadeEngine made;
    made.engine = std::make_shared<ToyEngine>(std::get<std::shared_ptr<Engine>>(std::move(host)));
    made.platform = std::make_shared<ToyPlatform>();
    made.memory = request.memory ? request.memory : std::make_shared<ToyMemory>();
    return made;
  };
  return kind;
}

// A process with the toy registered, and without NCCL.
class EnginesTest : public testing::Test {
 protected:
  EnginesTest() {
    EngineKind no_nccl = ncclEngineKind();
    nccl_asked = 0;
    no_nccl.make = [](const EngineRequest&) {
      ++nccl_asked;
      return NotHere{"NCCL is put away"};
    };
    engineRegistry().registerEngine(std::move(no_nccl));
    engineRegistry().registerEngine(toyKind());
    toy_is_here = true;
    options_->interface = "lo";
  }
  ~EnginesTest() override {
    toy_is_here = false;
    engineRegistry().registerEngine(ncclEngineKind());
  }

  EngineChoice make(const std::string& name) {
    return makeEngine(name, *options_, c10::make_intrusive<c10d::HashStore>(), std::nullopt);
  }
  std::string refusalOf(const std::string& name) {
    try {
      make(name);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "it was made";
  }

  const c10::intrusive_ptr<FtOptions> options_ = c10::make_intrusive<FtOptions>();
};

using DeviceTypes = std::vector<c10::DeviceType>;

TEST_F(EnginesTest, ARegisteredEngineServesItsNameAlone) {
  const EngineChoice choice = make("toy");
  EXPECT_STREQ(choice.engine->name(), "toy");
  EXPECT_EQ(choice.devices.types(), DeviceTypes{kToyDevice});
}

TEST_F(EnginesTest, AnEngineInTheOthersPlaceTakesItsMemoryPoolsOver) {
  const auto memory = make("ft").memory;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(makeEngine("ft", *options_, store, std::nullopt, memory).memory, memory);
}

TEST_F(EnginesTest, FtServesTheCpuAndTheFirstDeviceThatIsHere) {
  const EngineChoice choice = make("ft");
  EXPECT_STREQ(choice.engine->name(), "toy");
  EXPECT_EQ(choice.devices.types(), (DeviceTypes{c10::kCPU, kToyDevice}));
}

TEST_F(EnginesTest, FtServesTheCpuAloneWhereNoDeviceIsHereAndSaysWhy) {
  toy_is_here = false;
  const EngineChoice choice = make("ft");
  EXPECT_STREQ(choice.engine->name(), "host");
  EXPECT_EQ(choice.devices.types(), DeviceTypes{c10::kCPU});
  EXPECT_EQ(choice.devices.whyNone(), "NCCL is put away; the toy is put away");
}

TEST_F(EnginesTest, AnEngineThatIsNotHereIsRefusedWithTheReason) {
  toy_is_here = false;
  EXPECT_EQ(refusalOf("toy"),
            "the backend 'ft:toy' needs a toy: the toy is put away; use 'ft:host' for CPU tensors");
  EXPECT_THROW(make("toy"), c10::NotImplementedError);
}

TEST_F(EnginesTest, AnUnknownNameIsRefusedWithTheRegisteredOnes) {
  EXPECT_EQ(refusalOf("tcp"),
            "engine: expected 'ft', 'host', 'nccl', 'toy' or 'gloo', found 'tcp'");
}

TEST_F(EnginesTest, AnEngineWithTheSameNameTakesThePlaceOfTheEarlierOne) {
  EXPECT_NE(refusalOf("nccl").find("NCCL is put away"), std::string::npos);
  EXPECT_EQ(engineNames(), (std::vector<std::string>{"host", "nccl", "toy"}));
}

TEST_F(EnginesTest, NcclIsNotLookedForByAGroupThatIsNamedForTheCpu) {
  make("host");
  EXPECT_EQ(nccl_asked, 0);
  make("ft");
  EXPECT_EQ(nccl_asked, 1);
}

TEST_F(EnginesTest, AFailureOfAnEnginesMakeIsRaisedAndNoOtherEngineTakesItsPlace) {
  EngineKind broken = toyKind();
  broken.make = [](const EngineRequest&) -> EngineKind::Outcome {
    Failure failure;
    failure.kind = FailureKind::kInternal;
    failure.cause.how = "the toy fell apart";
    return failure;
  };
  engineRegistry().registerEngine(std::move(broken));
  for (const char* name : {"toy", "ft"}) {
    try {
      make(name);
      ADD_FAILURE() << name << " was made";
    } catch (const CommError& error) {
      EXPECT_EQ(error.failure().cause.how, "the toy fell apart") << name;
    }
  }
}

// In a child of its own, since it ends all threads of the process.
bool stepIsTakenAtTheEnd(bool toy_was_made) {
  static bool stopped = false;
  EngineKind stopping = toyKind();
  stopping.stop = [](Deadline) { return stopped = true; };
  const pid_t child = ::fork();
  if (child == 0) {
    engineRegistry().registerEngine(std::move(stopping));
    const auto options = c10::make_intrusive<FtOptions>();
    options->interface = "lo";
    const char* name = toy_was_made ? "toy" : "host";
    const auto watchdog = sharedWatchdog();  // as every group has it
    makeEngine(name, *options, c10::make_intrusive<c10d::HashStore>(), std::nullopt);
    processExit(Deadline::after(std::chrono::seconds(20)));
    ::_exit(stopped ? 1 : 0);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return WEXITSTATUS(status) == 1;
}

TEST_F(EnginesTest, AnEnginesThreadsAreStoppedAtTheProcesssEndIfOneWasMade) {
  if (underThreadSanitizer()) GTEST_SKIP() << "it lets no forked child start threads";
  EXPECT_TRUE(stepIsTakenAtTheEnd(true));
  EXPECT_FALSE(stepIsTakenAtTheEnd(false));
}

}  // namespace
}  // namespace torchft_ext
