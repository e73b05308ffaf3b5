// Ends a process that cannot end itself because a call that never returns holds Python's global interpreter lock.
#ifndef TFPAR_OPS_CORE_ENDING_H_
#define TFPAR_OPS_CORE_ENDING_H_

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

// Starts a thread that owns the descriptor `fd` and waits for a line on it. When a line arrives, the thread writes it
// to standard error and ends the process with exit code `code`, without any clean-up. If `fd` ends before a complete
// line has arrived, nothing happens. Returns 0, ENOMEM, or the error number of pthread_create.
int tfpar_end_on_message(int fd, int code);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif  // TFPAR_OPS_CORE_ENDING_H_
