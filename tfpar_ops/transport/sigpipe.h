// Gloo writes to connections that a lost worker may have closed, without MSG_NOSIGNAL. Python ignores the signal that this
// raises, but a program may have restored it (`signal.signal(SIGPIPE, SIG_DFL)`): then it would end the process.
#ifndef TFPAR_OPS_TRANSPORT_SIGPIPE_H_
#define TFPAR_OPS_TRANSPORT_SIGPIPE_H_

#include <pthread.h>
#include <signal.h>

namespace tfpar {

// Blocks the signal in this thread until it is destroyed, and for good in the threads that are created meanwhile.
class BlockedSigpipe {
 public:
  BlockedSigpipe() {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &before_);
  }
  ~BlockedSigpipe() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSigpipe(const BlockedSigpipe&) = delete;
  BlockedSigpipe& operator=(const BlockedSigpipe&) = delete;

 private:
  sigset_t before_;
};

}  // namespace tfpar

#endif  // TFPAR_OPS_TRANSPORT_SIGPIPE_H_
