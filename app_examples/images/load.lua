-- Uploads of photo.jpg in the current folder, for wrk: see docs/how-to/images.md.
local file = assert(io.open("photo.jpg", "rb"))
local head = '--edge\r\ncontent-disposition: form-data; name="image"; filename="photo.jpg"\r\n\r\n'
wrk.method = "POST"
wrk.path = "/thumbnail"
wrk.headers["content-type"] = "multipart/form-data; boundary=edge"
wrk.body = head .. file:read("*a") .. "\r\n--edge--\r\n"
file:close()
