// Which sanitizer this program was built with, for tests that one of them cannot run.
#pragma once

namespace torchft_ext {

constexpr bool underThreadSanitizer() {
#if defined(__SANITIZE_THREAD__)
  return true;
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
  return true;
#endif
#endif
  return false;
}

}  // namespace torchft_ext
