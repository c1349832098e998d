#include "comm/dump_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "comm/callbacks.h"
#include "comm/operation_dump.h"

namespace torchft_ext {
namespace {

using Snapshot = OperationRecorder::Snapshot;

constexpr const char* kPrefixVariable = "TORCH_FR_DUMP_TEMP_FILE";
constexpr int kReadableByAll = 0644;

struct Dumps {
  Mutex mutex;
  std::vector<std::weak_ptr<OperationRecorder>> recorders GUARDED_BY(mutex);
  std::atomic<int> begun{0};
  std::atomic<bool> warned{false};
};
PerProcess<Dumps> dumps;

int writeAll(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

int writeNew(const std::string& path, std::string_view text) {
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kReadableByAll));
  if (fd.get() < 0) return errno;
  return writeAll(fd.get(), text);
}

// 0, or an errno.
int writeFile(const std::string& path, std::string_view text) {
  static std::atomic<uint64_t> serial{0};  // two threads may write to one path
  const std::string beside =
      path + "." + std::to_string(::getpid()) + "." + std::to_string(serial.fetch_add(1)) + ".tmp";
  int error = writeNew(beside, text);
  if (error == 0 && std::rename(beside.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) ::unlink(beside.c_str());
  return error;
}

void warnOnce(const std::string& path, int error) {
  if (dumps.get().warned.exchange(true)) return;
  log(LogLevel::kWarning, "the record of a failed generation cannot be written to " + path + ": " +
                              std::generic_category().message(error) + "; " + kPrefixVariable +
                              " is to name a folder that exists and can be written, and how names "
                              "of files in it begin (later ones that fail are not reported)");
}

void writeOrWarn(const std::string& path, const Snapshot& snapshot, DumpFor reader) {
  const int error = writeFile(path, dumpOf({snapshot}, reader));
  if (error != 0) warnOnce(path, error);
}

void writeFailed(const std::string& prefix, const Snapshot& snapshot) {
  const GenerationRecord& generation = snapshot.generation;
  const std::string rank = std::to_string(generation.rank);
  const std::string common = prefix + std::to_string(generation.first_rank) + ".generation" +
                             std::to_string(generation.number) + "_" + generation.id;
  writeOrWarn(common + "_" + rank, snapshot, DumpFor::kTorch);
  writeOrWarn(common + "." + rank + ".json", snapshot, DumpFor::kAnalyze);
}

std::vector<std::shared_ptr<OperationRecorder>> liveRecorders() {
  std::vector<std::shared_ptr<OperationRecorder>> live;
  Dumps& own = dumps.get();
  MutexLock lock(own.mutex);
  for (const auto& weak : own.recorders)
    if (auto recorder = weak.lock()) live.push_back(std::move(recorder));
  return live;
}

}  // namespace

void rememberRecorder(const std::shared_ptr<OperationRecorder>& recorder) {
  Dumps& own = dumps.get();
  MutexLock lock(own.mutex);
  std::erase_if(own.recorders, [](const auto& weak) { return weak.expired(); });
  own.recorders.push_back(recorder);
}

std::string failureDumpPrefix() {
  const char* const prefix = std::getenv(kPrefixVariable);  // nothing here calls setenv
  return prefix == nullptr ? "" : prefix;
}

void dumpFailedGeneration(const std::shared_ptr<OperationRecorder>& recorder, int64_t generation,
                          const std::string& prefix) {
  if (!recorder->dumps() || prefix.empty()) return;
  if (dumps.get().begun.fetch_add(1) >= kMostFailureDumps) return;
  runOnCallbackThread([recorder, generation, prefix] {
    if (const auto snapshot = recorder->snapshotOf(generation)) writeFailed(prefix, *snapshot);
  });
}

std::vector<std::string> waitsOfProcess() {
  std::vector<std::string> all;
  for (const auto& recorder : liveRecorders())
    if (std::string waits = recorder->waits(); !waits.empty()) all.push_back(std::move(waits));
  return all;
}

int dumpEverything(const std::string& path) {
  std::vector<Snapshot> all;
  for (const auto& recorder : liveRecorders())
    for (Snapshot& snapshot : recorder->snapshots()) all.push_back(std::move(snapshot));
  return writeFile(path,
                   dumpOf(all, path.ends_with(".json") ? DumpFor::kAnalyze : DumpFor::kTorch));
}

}  // namespace torchft_ext
