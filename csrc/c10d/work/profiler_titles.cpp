#include "c10d/work/profiler_titles.h"

#include <map>
#include <string_view>
#include <utility>

#include "base/mutex.h"

namespace torchft_ext {
namespace {

constexpr std::string_view kOwn = "ft";

// torch keeps the pointer alone, so titles stay: there are as many as kinds of operations.
class Interned {
 public:
  const char* get(const std::string& backend_name, const char* title) {
    const MutexLock lock(mutex_);
    const auto [found, fresh] = titles_.try_emplace({backend_name, title});
    if (fresh) found->second = backend_name + (title + kOwn.size());
    return found->second.c_str();
  }

 private:
  Mutex mutex_;
  std::map<std::pair<std::string, const char*>, std::string> titles_ GUARDED_BY(mutex_);
};

}  // namespace

const char* ProfilerTitles::of(const char* title) const {
  if (backend_name_ == kOwn) return title;
  static Interned& interned = *new Interned;  // never destroyed: works may outlive main()
  return interned.get(backend_name_, title);
}

}  // namespace torchft_ext
