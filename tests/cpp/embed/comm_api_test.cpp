// The public headers without torch: comm.h, store.h, error.h, log.h, c.h.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "cpp/support/processes.h"
#include "cpp/support/wait_for.h"
#include "torchft_ext/c.h"
#include "torchft_ext/comm.h"
#include "torchft_ext/log.h"

namespace torchft_ext {
namespace {

constexpr DataType kFloat = DataType::kFloat32;

struct Directory {
  Directory() : path(::testing::TempDir() + "comm_" + std::to_string(::getpid())) {}
  ~Directory() { std::filesystem::remove_all(path); }
  const std::string path;
};

struct Alone {
  Alone() { comm.configure(store, "alone", 0, 1); }
  std::shared_ptr<Store> store = makeMemoryStore();
  Comm comm;
};

std::string textOf(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

template <typename Call>
std::string refusalOf(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(CommApi, WhatGroupsHaveRecordedIsDumped) {
  const Directory directory;
  std::filesystem::create_directory(directory.path);
  Alone alone;
  std::vector<float> data{1, 2, 3};
  alone.comm.allreduce(data.data(), 3, kFloat, Reduction::kSum).wait();
  const std::string path = directory.path + "/now.json";
  dump(path);
  const std::string text = textOf(path);
  EXPECT_NE(text.find("\"operation\": \"allreduce\""), std::string::npos) << text;
  EXPECT_NE(text.find("\"output_sizes\": [[3]]"), std::string::npos) << text;
  try {
    dump(directory.path + "/missing/now.json");
    ADD_FAILURE() << "there is no such folder";
  } catch (const std::system_error& error) {
    EXPECT_EQ(error.code(), std::errc::no_such_file_or_directory);
    EXPECT_NE(std::string(error.what()).find("/missing/now.json"), std::string::npos);
  }
  EXPECT_EQ(tft_dump((directory.path + "/c.json").c_str(), nullptr), TFT_OK);
  EXPECT_EQ(textOf(directory.path + "/c.json").substr(0, 1), "{");
  EXPECT_EQ(tft_dump((directory.path + "/missing/c.json").c_str(), nullptr), TFT_SYSTEM);
  EXPECT_EQ(tft_dump(nullptr, nullptr), TFT_INVALID_ARGUMENT);
}

TEST(CommApi, AWorldOfOneComputesAlone) {
  Alone alone;
  std::vector<float> data{1, 2};
  std::vector<float> output(2);
  alone.comm.allreduce(data.data(), 2, kFloat, Reduction::kSum).wait();
  alone.comm.allgather(data.data(), output.data(), 2, kFloat).wait();
  alone.comm.barrier().wait();
  alone.comm.check();
  EXPECT_EQ(output, (std::vector<float>{1, 2}));
  EXPECT_EQ(alone.comm.rank(), 0);
  EXPECT_EQ(alone.comm.size(), 1);
  EXPECT_EQ(alone.comm.generation(), 1);
  EXPECT_EQ(alone.comm.errored(), nullptr);
  EXPECT_TRUE(alone.comm.shutdown());
}

TEST(CommApi, BadArgumentsAreRefusedByName) {
  Alone alone;
  Comm& comm = alone.comm;
  float item = 0;
  EXPECT_EQ(refusalOf([&] { comm.allreduce(nullptr, 1, kFloat, Reduction::kSum); }),
            "allreduce: data: expected memory, found null");
  EXPECT_EQ(refusalOf([&] { comm.broadcast(&item, 1, kFloat, 1); }),
            "broadcast: root: expected 0 to 0, found 1");
  EXPECT_EQ(refusalOf([&] { comm.allreduce(&item, 1, kFloat, Reduction::kBitOr); }),
            "allreduce: reduction: expected integers or bool for a bitwise one, found float32");
  EXPECT_EQ(
      refusalOf([&] { comm.allreduce(&item, 1, static_cast<DataType>(77), Reduction::kSum); }),
      "allreduce: type: expected a DataType, found 77");
  EXPECT_EQ(refusalOf([&] { comm.send(&item, 1, kFloat, 0); }),
            "send: destination: expected another rank than this one");
  EXPECT_EQ(refusalOf([&] { comm.configure(nullptr, "x", 0, 1); }),
            "configure: store: expected a store, found null");
  EXPECT_EQ(refusalOf([&] { comm.configure(alone.store, "x", 2, 2); }),
            "configure: rank: expected 0 to 1, found 2");
  EXPECT_EQ(refusalOf([&] { comm.setTimeout(Comm::Milliseconds(0)); }),
            "setTimeout: timeout: expected a positive time, found 0 ms");
  EXPECT_EQ(refusalOf([&] { comm.configure(alone.store, "x", 0, 65537); }),
            "configure: size: expected 1 to 65536, found 65537");
  EXPECT_EQ(refusalOf([&] { comm.configure(alone.store, "x", 0, 1, Comm::Milliseconds(-1)); }),
            "configure: timeout: expected zero (the options') or more, found -1 ms");
  EXPECT_EQ(refusalOf([&] { comm.check(Comm::Milliseconds(-1)); }),
            "check: timeout: expected zero (the options') or more, found -1 ms");
  EXPECT_EQ(refusalOf([&] { comm.shutdown(Comm::Milliseconds(-1)); }),
            "shutdown: timeout: expected zero or more, found -1 ms");
  comm.barrier().wait();  // nothing has come of it
}

TEST(CommApi, BadOptionsAreRefusedByName) {
  CommOptions options;
  options.heartbeat = Comm::Milliseconds(5);
  EXPECT_EQ(refusalOf([&] { Comm comm(options); }),
            "Comm: heartbeat: expected zero (off) or at least 100 ms, found 5 ms");
  options = {};
  options.timeout = Comm::Milliseconds(-1);
  EXPECT_EQ(refusalOf([&] { Comm comm(options); }),
            "Comm: timeout: expected a positive time, found -1 ms");
  options = {};
  options.port_range = "9-1";
  EXPECT_EQ(refusalOf([&] { Comm comm(options); }),
            "Comm: port_range: expected a range of at least 3 ports such as '7000-7100', found "
            "'9-1'");
  options = {};
  options.interface = "no such one";
  EXPECT_NE(refusalOf([&] { Comm comm(options); }).find("Comm: interface: expected"),
            std::string::npos);
}

TEST(CommApi, OperationsBeforeAGenerationHaveFailed) {
  Comm comm;
  const Request request = comm.barrier();
  EXPECT_TRUE(request.done());
  EXPECT_THROW(request.wait(), CommAbortedError);
  EXPECT_EQ(request.tryWait()->kind, FailureKind::kAborted);
}

TEST(CommApi, AbortFailsWhatComesAfterUntilTheNextGeneration) {
  Alone alone;
  alone.comm.abort("enough");
  try {
    alone.comm.barrier().wait();
    FAIL() << "expected the abort";
  } catch (const CommError& error) {
    EXPECT_EQ(error.failure().cause.how, "enough");
    EXPECT_EQ(std::string(error.what()), error.failure().describe());
  }
  EXPECT_THROW(alone.comm.check(), CommAbortedError);
  EXPECT_EQ(alone.comm.tryCheck()->cause.how, "enough");
  alone.comm.configure(alone.store, "next", 0, 1);
  alone.comm.barrier().wait();
  EXPECT_EQ(alone.comm.tryCheck(), nullptr);
}

TEST(CommApi, EveryErrorIsAnExceptionOfTheLibraryToo) {
  Comm comm;
  try {
    comm.barrier().wait();
    FAIL() << "expected an error";
  } catch (const std::exception& error) {
    EXPECT_NE(dynamic_cast<const CommAbortedError*>(&error), nullptr);
  }
}

TEST(CommApi, NothingBeginsAfterShutdown) {
  Alone alone;
  EXPECT_TRUE(alone.comm.shutdown());
  EXPECT_THROW(alone.comm.configure(alone.store, "again", 0, 1), std::logic_error);
  EXPECT_THROW(alone.comm.barrier().wait(), CommAbortedError);
}

class BrokenStore : public Store {
 public:
  void set(const std::string&, const std::string&) override { throw std::runtime_error("no wire"); }
  std::optional<std::string> get(const std::string&) override { return std::nullopt; }
  void remove(const std::string&) override {}
};

TEST(CommApi, AStoreThatThrowsIsLost) {
  Comm comm;
  try {
    comm.configure(std::make_shared<BrokenStore>(), "x", 0, 1, std::chrono::seconds(20));
    FAIL() << "expected a lost store";
  } catch (const StoreLostError& error) {
    EXPECT_NE(std::string(error.what()).find("no wire"), std::string::npos) << error.what();
  }
}

TEST(CommApi, WhoDoesNotComeIsATimeout) {
  Comm comm;
  const FailurePtr failure =
      comm.tryConfigure(makeMemoryStore(), "x", 0, 2, std::chrono::milliseconds(300));
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind, FailureKind::kTimeout);
}

TEST(CommApi, AForkedChildIsRefused) {
  Alone alone;
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      alone.comm.barrier();
    } catch (const std::runtime_error& error) {
      status = std::string(error.what()).find("made before fork()") == std::string::npos ? 2 : 0;
    }
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  alone.comm.barrier().wait();
}

TEST(CommApi, FilesHoldAnyKeyAndValue) {
  const Directory directory;
  const auto store = makeFileStore(directory.path + "/a/b");
  const auto other = makeFileStore(directory.path + "/a/b");
  const std::string value("\0x\xff", 3);
  EXPECT_EQ(store->get("some/../key %"), std::nullopt);
  store->set("some/../key %", "first");
  store->set("some/../key %", value);
  EXPECT_EQ(other->get("some/../key %"), value);
  EXPECT_EQ(other->get("some/../key"), std::nullopt);
  other->remove("some/../key %");
  other->remove("some/../key %");
  EXPECT_EQ(store->get("some/../key %"), std::nullopt);
  EXPECT_TRUE(std::filesystem::is_empty(directory.path + "/a/b"));
}

TEST(CommApi, FourProcessesDoAllOperationsAndLoseOne) {
  const Directory directory;
  Processes survivors;
  Processes last;
  constexpr int kSize = 4;
  for (int rank = 0; rank < kSize; ++rank) {
    (rank == kSize - 1 ? last : survivors)
        .start({TFT_COMM_RANK, directory.path, std::to_string(rank), std::to_string(kSize)});
  }
  EXPECT_TRUE(survivors.endWell(Deadline::after(std::chrono::seconds(120))));
}

// ---- C

// What the library logs while it lives, at this level.
class LogOfProgram {
 public:
  explicit LogOfProgram(LogLevel least) {
    setLogLevel(least);
    setLogSink([lines = lines_](LogLevel, const std::string& line) {
      const MutexLock lock(lines->mutex);
      lines->all += line + "\n";
    });
  }
  ~LogOfProgram() {
    setLogSink({});
    setLogLevel(LogLevel::kWarning);
  }
  bool has(const std::string& text) const {
    const MutexLock lock(lines_->mutex);
    return lines_->all.find(text) != std::string::npos;
  }
  bool isEmpty() const {
    const MutexLock lock(lines_->mutex);
    return lines_->all.empty();
  }

 private:
  struct Lines {
    mutable Mutex mutex;
    std::string all GUARDED_BY(mutex);
  };
  const std::shared_ptr<Lines> lines_ = std::make_shared<Lines>();
};

constexpr const char* kBegins = "generation 1 of 1 ranks begins";

TEST(CommApi, LinesOfTheLogGoToTheProgramsSink) {
  const LogOfProgram log(LogLevel::kInfo);
  const Alone alone;
  EXPECT_TRUE(waitFor([&] { return log.has(kBegins); }));
}

TEST(CommApi, LinesBelowTheLevelAreDropped) {
  const LogOfProgram log(LogLevel::kWarning);
  Alone alone;
  torchft_ext::log(LogLevel::kWarning, "the mark");  // behind whatever came before
  EXPECT_TRUE(waitFor([&] { return log.has("the mark"); }));
  EXPECT_FALSE(log.has(kBegins));
}

TEST(CommApi, ASilencedLogHasNoLineOfAFailedConfigureEither) {
  const LogOfProgram log(LogLevel::kNothing);
  Comm comm;
  EXPECT_NE(comm.tryConfigure(makeMemoryStore(), "x", 0, 2, std::chrono::milliseconds(50)),
            nullptr);
  setLogLevel(LogLevel::kWarning);
  torchft_ext::log(LogLevel::kWarning, "the mark");
  EXPECT_TRUE(waitFor([&] { return log.has("the mark"); }));
  EXPECT_FALSE(log.has("timed out"));
}

TEST(CommApi, CHasTheLogToo) {
  struct Told {
    std::promise<std::string> line;
    bool once = true;
  } told;
  const auto keep = [](void* to, tft_log_level level, const char* line) {
    auto& all = *static_cast<Told*>(to);
    if (level == TFT_LOG_INFO && std::exchange(all.once, false)) all.line.set_value(line);
  };
  tft_set_log_level(TFT_LOG_INFO);
  ASSERT_EQ(tft_set_log_sink(keep, &told, nullptr), TFT_OK);
  const Alone alone;
  const std::string line = told.line.get_future().get();
  tft_set_log_sink(nullptr, nullptr, nullptr);
  tft_set_log_level(TFT_LOG_WARNING);
  EXPECT_NE(line.find(kBegins), std::string::npos) << line;
}

// As a program in C may give it.
template <typename Enum>
Enum numbered(int number) {
  return static_cast<Enum>(number);  // NOLINT(clang-analyzer-optin.core.EnumCastOutOfRange)
}

TEST(CommApi, ReadsTheVariableOfSharedMemory) {
  const char* const variable = "TORCHFT_EXT_SHARED_MEMORY";
  const char* before = std::getenv(variable);
  const std::string restored = before == nullptr ? "" : before;
  ::setenv(variable, "maybe", 1);
  EXPECT_THROW(Comm(), std::invalid_argument);
  ::setenv(variable, "0", 1);
  Comm one;
  Comm other;
  restored.empty() ? ::unsetenv(variable) : ::setenv(variable, restored.c_str(), 1);
  const auto store = makeMemoryStore();
  std::thread beside([&] { other.configure(store, "over sockets", 1, 2); });
  one.configure(store, "over sockets", 0, 2);
  beside.join();
  EXPECT_EQ(one.stats().why_over_sockets,
            "this rank has turned off shared memory, or local sockets");
}

TEST(CommApi, CHasTimeoutStatsAndWholeErrors) {
  tft_comm* comm = nullptr;
  tft_store* store = nullptr;
  ASSERT_EQ(tft_comm_create(nullptr, &comm, nullptr), TFT_OK);
  ASSERT_EQ(tft_store_create_memory(&store, nullptr), TFT_OK);
  tft_error error;
  EXPECT_EQ(tft_comm_set_timeout(comm, 0, &error), TFT_INVALID_ARGUMENT);
  EXPECT_EQ(tft_comm_set_timeout(comm, 60, &error), TFT_OK);
  EXPECT_EQ(tft_comm_configure(comm, store, "late", 0, 2, 0, &error), TFT_TIMEOUT);
  EXPECT_STREQ(error.operation, "configure");
  EXPECT_NE(std::string(error.how), "");
  EXPECT_EQ(error.limit_ns, 60'000'000);
  EXPECT_GE(error.elapsed_ns, 40'000'000);
  ASSERT_EQ(tft_comm_configure(comm, store, "alone", 0, 1, 0, &error), TFT_OK);
  ASSERT_EQ(tft_barrier(comm, 0, nullptr, &error), TFT_OK);
  tft_stats stats;
  ASSERT_EQ(tft_comm_stats(comm, &stats, &error), TFT_OK);
  EXPECT_EQ(stats.generations, 1U);
  EXPECT_EQ(stats.failed_configures, 1U);
  EXPECT_EQ(stats.operations, 1U);
  EXPECT_EQ(stats.last_failure.status, TFT_TIMEOUT);
  ASSERT_EQ(stats.phases, 3);
  EXPECT_STREQ(stats.last_configure[1].name, "rendezvous");
  EXPECT_EQ(tft_size_of(TFT_FLOAT16), 2U);
  EXPECT_EQ(tft_size_of(numbered<tft_type>(77)), 0U);
  EXPECT_EQ(tft_size_of(numbered<tft_type>(256)), 0U);
  EXPECT_EQ(tft_broadcast(comm, &stats, 1, numbered<tft_type>(256), 0, 0, nullptr, &error),
            TFT_INVALID_ARGUMENT);
  EXPECT_STREQ(error.message, "type: expected one of the enum, found 256");
  tft_comm_destroy(comm);
  tft_store_destroy(store);
}

TEST(CommApi, CTellsStatusAndMessage) {
  tft_error error{};
  tft_comm* comm = nullptr;
  tft_store* store = nullptr;
  ASSERT_EQ(tft_comm_create(nullptr, &comm, &error), TFT_OK);
  ASSERT_EQ(tft_store_create_memory(&store, &error), TFT_OK);
  EXPECT_EQ(tft_barrier(comm, 0, nullptr, &error), TFT_ABORTED);
  EXPECT_EQ(tft_comm_configure(comm, store, "p", 1, 1, 0, &error), TFT_INVALID_ARGUMENT);
  EXPECT_STREQ(error.message, "configure: rank: expected 0 to 0, found 1");
  EXPECT_EQ(tft_comm_configure(comm, nullptr, "p", 0, 1, 0, nullptr), TFT_INVALID_ARGUMENT);
  ASSERT_EQ(tft_comm_configure(comm, store, "p", 0, 1, 0, &error), TFT_OK);
  tft_request* request = nullptr;
  double value = 3;
  ASSERT_EQ(tft_allreduce(comm, &value, 1, TFT_FLOAT64, TFT_SUM, 0, &request, &error), TFT_OK);
  EXPECT_EQ(tft_request_wait(request, &error), TFT_OK);
  EXPECT_EQ(tft_request_done(request), 1);
  tft_request_destroy(request);
  EXPECT_EQ(tft_comm_errored(comm, &error), TFT_OK);
  EXPECT_EQ(tft_comm_abort(comm, "enough", &error), TFT_OK);
  EXPECT_EQ(tft_comm_errored(comm, &error), TFT_ABORTED);
  EXPECT_NE(std::string(error.message).find("enough"), std::string::npos);
  EXPECT_EQ(error.generation, 1);
  EXPECT_EQ(tft_comm_shutdown(comm, 0, &error), TFT_OK);
  EXPECT_EQ(tft_comm_configure(comm, store, "p", 0, 1, 0, &error), TFT_INVALID_STATE);
  tft_store_destroy(store);
  tft_comm_destroy(comm);
  tft_comm_destroy(nullptr);
}

TEST(CommApi, CStoresAreReleasedOnce) {
  struct Context {
    std::map<std::string, std::string> values;
    int released = 0;
  } context;
  tft_store_calls calls{};
  calls.context = &context;
  calls.set = [](void* to, const char* key, const void* value, size_t bytes) {
    static_cast<Context*>(to)->values[key].assign(static_cast<const char*>(value), bytes);
    return 0;
  };
  calls.get = [](void* from, const char* key, void (*found)(void*, const void*, size_t), void* to) {
    const auto& values = static_cast<Context*>(from)->values;
    const auto value = values.find(key);
    if (value != values.end()) found(to, value->second.data(), value->second.size());
    return 0;
  };
  calls.remove = [](void* from, const char* key) {
    static_cast<Context*>(from)->values.erase(key);
    return 0;
  };
  calls.release = [](void* of) { ++static_cast<Context*>(of)->released; };
  tft_store* store = nullptr;
  tft_comm* comm = nullptr;
  tft_error error{};
  ASSERT_EQ(tft_store_create(&calls, &store, &error), TFT_OK);
  ASSERT_EQ(tft_comm_create(nullptr, &comm, &error), TFT_OK);
  EXPECT_EQ(tft_comm_configure(comm, store, "mine", 0, 1, 0, &error), TFT_OK) << error.message;
  EXPECT_EQ(tft_barrier(comm, 0, nullptr, &error), TFT_OK);
  tft_comm_shutdown(comm, 0, nullptr);
  tft_comm_destroy(comm);
  tft_store_destroy(store);
  EXPECT_TRUE(waitFor([&] { return context.released == 1; }));
  calls.get = nullptr;
  EXPECT_EQ(tft_store_create(&calls, &store, &error), TFT_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace torchft_ext
