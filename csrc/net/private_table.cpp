#include "net/private_table.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <charconv>
#include <set>
#include <string_view>

#include "base/fork.h"
#include "base/mutex.h"

#if defined(__SANITIZE_THREAD__)
#define TFT_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TFT_THREAD_SANITIZER 1
#endif
#endif

namespace torchft_ext {
namespace {

#if defined(TFT_THREAD_SANITIZER)
constexpr bool kAllowed = false;
#else
constexpr bool kAllowed = true;
#endif
constexpr unsigned kFirst = 3;  // standard streams stay: the log writes to them

bool closeRange(unsigned first, unsigned last, unsigned flags) {
  if (first > last) return true;
  return ::syscall(SYS_close_range, first, last, flags) == 0;
}

// Linux 5.9: the new table is never filled with what is not wanted.
bool unshareByCloseRange(unsigned keep) {
  if (keep < kFirst) return closeRange(kFirst, ~0U, CLOSE_RANGE_UNSHARE);
  if (!closeRange(keep + 1, ~0U, CLOSE_RANGE_UNSHARE)) return false;
  closeRange(kFirst, keep - 1, 0);  // this thread's own table by now
  return true;
}

std::vector<int> openDescriptors() {
  std::vector<int> open;
  DIR* directory = ::opendir("/proc/thread-self/fd");  // "self" would be the main thread's table
  if (directory == nullptr) {
    for (int fd = 0; fd < 4096; ++fd) open.push_back(fd);
    return open;
  }
  while (const dirent* entry = ::readdir(directory)) {
    const std::string_view name = entry->d_name;
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    if (fd >= 0 && fd != ::dirfd(directory)) open.push_back(fd);
  }
  ::closedir(directory);
  return open;
}

bool unshareByCopying(int keep) {
  if (::unshare(CLONE_FILES) != 0) return false;
  for (const int fd : openDescriptors()) {
    if (fd >= static_cast<int>(kFirst) && fd != keep) ::close(fd);
  }
  return true;
}

struct Owners {
  Mutex mutex;
  std::set<pid_t> threads GUARDED_BY(mutex);
};
PerProcess<Owners> owners;

// While the thread lives.
class Listed {
 public:
  Listed() {
    Owners& all = owners.get();
    MutexLock lock(all.mutex);
    all.threads.insert(thread_);
  }
  ~Listed() {
    Owners& all = owners.get();
    MutexLock lock(all.mutex);
    all.threads.erase(thread_);
  }
  Listed(const Listed&) = delete;
  Listed& operator=(const Listed&) = delete;

 private:
  const pid_t thread_ = ::gettid();
};

}  // namespace

bool takePrivateTable(int keep) {
  if (!kAllowed || keep < 0) return false;
  if (!unshareByCloseRange(static_cast<unsigned>(keep)) && !unshareByCopying(keep)) return false;
  thread_local const Listed listed;  // NOLINT(clang-diagnostic-exit-time-destructors): the thread's
  return true;
}

std::vector<pid_t> threadsWithPrivateTables() {
  Owners& all = owners.get();
  MutexLock lock(all.mutex);
  return {all.threads.begin(), all.threads.end()};
}

}  // namespace torchft_ext
