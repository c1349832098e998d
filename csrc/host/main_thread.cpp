#include "host/main_thread.h"

#include "base/main_thread_waits.h"
#include "liveness/process_state.h"

namespace torchft_ext {
namespace {

MainThread stateOf(char letter) {
  switch (letter) {
    case 'R':
      return MainThread::kRuns;
    case 'S':
      return MainThread::kSleeps;
    case 'D':
      return MainThread::kBlocked;
    case 'T':
    case 't':
      return MainThread::kStopped;
    case 'Z':
    case 'X':
      return MainThread::kEnded;
    default:
      return MainThread::kUnknown;
  }
}

}  // namespace

const char* describe(MainThread state) {
  switch (state) {
    case MainThread::kUnknown:
      break;
    case MainThread::kWaits:
      return "its main thread waits in the library";
    case MainThread::kRuns:
      return "its main thread runs";
    case MainThread::kSleeps:
      return "its main thread sleeps";
    case MainThread::kBlocked:
      return "its main thread is in uninterruptible sleep";
    case MainThread::kStopped:
      return "its main thread is stopped";
    case MainThread::kEnded:
      return "its main thread has ended";
  }
  return "";
}

MainThread mainThreadNow() {
  if (mainThreadWaits()) return MainThread::kWaits;
  return stateOf(mainThreadStateLetter());
}

}  // namespace torchft_ext
