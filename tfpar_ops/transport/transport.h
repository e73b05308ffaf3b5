// The C ABI of the transport, with which Python creates and closes a mesh of workers. Operations make the calls through it.
#ifndef TFPAR_OPS_TRANSPORT_TRANSPORT_H_
#define TFPAR_OPS_TRANSPORT_TRANSPORT_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

// Version of these functions and of the operations; increase it with every change of them.
// tfpar_ops/transport_library.py has the same number, and loads no library that has another one.
#define TFPAR_TRANSPORT_ABI_VERSION 5
int32_t tfpar_transport_abi_version(void);

// Creates the part of worker `rank` in a mesh of `size` workers, and listens on a port for the others until all are connected.
//   names: of all workers, for error messages.
//   host: name or address of this machine, on which the worker listens.
//   token: the same on all workers, up to 64 bytes. Connections without it are dropped.
//   timeout_ms: of the connection.
//   silence_ms: after which a connection is lost if the system of the peer does not answer on it.
// Returns the number of the mesh, from 1; or 0 and an error message.
int64_t tfpar_transport_listen(int32_t rank, int32_t size, const char* const* names, const char* host, const char* token,
                               int64_t timeout_ms, int64_t silence_ms, char* message, size_t message_size);

// Copies the address that the other workers must know into `buffer`, with a zero at the end, if it fits, and returns its length
// without it; 0 once all are connected.
int64_t tfpar_transport_address(int64_t mesh, char* buffer, int64_t size);

// Connects to all workers. Blocks.
//   addresses: of the workers, by rank.
// Returns 0; or 1 and an error message.
int tfpar_transport_connect(int64_t mesh, const char* const* addresses, char* message, size_t message_size);

// Number of connections that were dropped because they did not have the token.
int64_t tfpar_transport_dropped(int64_t mesh);

// Milliseconds since the oldest running call began; 0 if none is running.
int64_t tfpar_transport_waiting_ms(int64_t mesh);

// Ends all calls, later ones included, also those of the other workers, which receive the reason. The first reason is kept.
// Does not block.
//   own: whether this worker is the cause. If not, calls end with an UnavailableError, here as there.
void tfpar_transport_abort(int64_t mesh, int32_t own, const char* reason);

// Ends all calls and all threads, and closes the connections. Blocks until then. Does nothing in a forked process, for which no
// other function finds the mesh either.
void tfpar_transport_close(int64_t mesh);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif

#endif  // TFPAR_OPS_TRANSPORT_TRANSPORT_H_
